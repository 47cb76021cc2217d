# An image of the gateway and the worker of many machines: docker build -f packaging/scale.Dockerfile -t refrain-scale:0.1.0 .
# Both base images can be replaced (--build-arg), by a mirror's or by digests; both have Debian 12's C library.
ARG BUILDER=docker.io/library/rust:1.95-bookworm
ARG RUNTIME=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILDER} AS build
# scale/setup needs them for Dynamo's runtime; the builder has the rest of what it looks for.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends cmake protobuf-compiler && rm -rf /var/lib/apt/lists/*
# Cargo reads the flags of this workspace where it is called.
WORKDIR /src/scale
COPY . /src
# The caches keep crates and objects from one build to the next, and stay out of the image.
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/scale/target \
    cargo build --release --locked && \
    mkdir -p /out/usr/bin /out/usr/share/doc/refrain-scale && \
    cp target/release/refrain-scale /out/usr/bin/refrain-scale && \
    cp ../LICENSE-MIT ../LICENSE-APACHE /out/usr/share/doc/refrain-scale/ && \
    python3 ../packaging/notices --manifest scale/Cargo.toml --package refrain-scale --features dynamo \
        > /out/usr/share/doc/refrain-scale/THIRD-PARTY.txt && \
    mkdir -p /owned/models /owned/data

# No shell and no package manager: nothing is left to run but the program.
FROM ${RUNTIME}
LABEL org.opencontainers.image.title="Refrain on many machines" \
      org.opencontainers.image.description="Workers, and gateways that send each request to the worker that holds its chunks" \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
COPY --from=build /out/ /
# Volumes begin as these folders are, and there is no shell to give them to a user later.
COPY --from=build --chown=65532:65532 /owned/ /
# The container's address is its own: what the world reaches of it is for `docker run --publish` to say.
ENV HOME=/data \
    XDG_DATA_HOME=/data \
    HF_HOME=/models/huggingface \
    REFRAIN_MODELS=/models \
    REFRAIN_STORE=/data/refrain/chunks \
    REFRAIN_HOST=0.0.0.0 \
    REFRAIN_PORT=8080
# Models as `refrain pull` leaves them, and a worker's chunks. A gateway keeps nothing.
VOLUME ["/models", "/data"]
USER 65532:65532
EXPOSE 8080
# A gateway is ready once it knows a worker, and a worker once its model's weights are packed.
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=3 CMD ["/usr/bin/refrain-scale", "probe"]
ENTRYPOINT ["/usr/bin/refrain-scale"]
