//! The kinds of jobs.

/// An ingest, as manifests name it.
pub(super) const INGEST: &str = "ingest";
/// An evaluation, as manifests name it.
pub(super) const EVAL: &str = "eval";

/// What the items and the work of a kind of job are called.
pub(super) fn nouns(kind: &str) -> (&'static str, &'static str) {
    if kind == EVAL { ("sample", "answer") } else { ("document", "token") }
}
