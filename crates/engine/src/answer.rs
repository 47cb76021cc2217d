//! Answers: loading, prefill with a method, decoding, and the account of what was really done.

use std::time::Instant;

use refrain_eviction::{Eviction, PromptSpans};
use refrain_fusion::FusionMethod;
use serde::Serialize;

use crate::bounded::Bounded;
use crate::forward::State;
use crate::likely::Likely;
use crate::load::{Loaded, Prefilled};
use crate::prefill::{Watch, Work};
use crate::retrieval::Retrieving;
use crate::writing::Writing;
use crate::{Engine, Error, Explanation, Prompt, Result, Sampling};

/// What an answer took, counted and timed while it was made.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Account {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of document chunks.
    pub document_tokens: usize,
    /// Prompt tokens whose keys and values were read from the cache at one layer at least.
    pub cached_tokens: usize,
    /// Document tokens that were computed at the deepest layer.
    pub recomputed_tokens: usize,
    /// Document rows computed over all layers / (layers × document tokens); layers that run in full count.
    pub recompute_ratio: f64,
    /// Layers at which every document token was computed.
    pub full_layers: usize,
    /// Tokens of the prompt that attention has before it when the first token is chosen, at every layer: what a method
    /// keeps or retrieves.
    pub kept_tokens: usize,
    /// The same / tokens of the prompt.
    pub sequence_ratio: f64,
    /// Times that a method met a case that its paper leaves open (SamKV: a layer and document whose kept blocks score not
    /// above the lowest).
    pub undecided: usize,
    /// Floating point operations of prefill's products and attention, as the chosen rows and the keys that each sees
    /// make them; the language head is left out.
    pub operations: f64,
    /// Seconds that the method took to score tokens and choose among them: at the layers where it narrows its rows, or with the
    /// question's first pass, where it selects by that.
    pub select_seconds: f64,
    /// Chunks that were not in the store, or broken there, and were prefilled again before the answer.
    pub repaired_chunks: usize,
    /// Bytes of keys and values that were brought in from the store's memory or folder. What a method does not use is
    /// brought in from the folder only.
    pub bytes_loaded: u64,
    /// Bytes of keys, values and summaries that were read from the folder.
    pub bytes_read: u64,
    /// Bytes of keys and values that the document chunks of the prompt have in the store, as they lie at rest.
    pub document_bytes: u64,
    /// Seconds that threads spent bringing them in (reading, verifying, rotating, placing), mostly beside the
    /// computing; summed over those threads.
    pub load_seconds: f64,
    /// Seconds from the request to the first token, loading included.
    pub ttft: f64,
    /// The same without the time in which the computing thread did nothing but wait for loading: opening files and
    /// reading their headers, and for layers that were not ready when their turn came.
    pub compute_ttft: f64,
    /// Seconds a token after the first; none for an answer of one token.
    pub tpot: Option<f64>,
    /// Tokens of the answer, the end token included.
    pub answer_tokens: usize,
    /// Bytes allocated for the keys and values that the answer was decoded with.
    pub kv_bytes: usize,
    /// Bytes that those held at the end take.
    pub kv_bytes_held: usize,
    /// Most bytes of keys and values that were allocated at a time, prefill included.
    pub kv_bytes_peak: usize,
    /// Bytes that full attention would hold at the end, one cache a KV head.
    pub kv_bytes_full: usize,
    /// Bytes kept beside keys and values at the end: an eviction policy's positions and statistics, or the representatives of
    /// blocks that are retrieved and what they are made from.
    pub side_bytes: usize,
    /// Tokens whose keys and values each head's cache holds at the end.
    pub retained_tokens: usize,
    /// What has a cache of its own: `kv_head`, or `query_head` as in the papers' figures of memory.
    pub kv_accounting: &'static str,
}

/// How a prompt is to be answered.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Which tokens are computed before the first one.
    pub method: &'a dyn FusionMethod,
    /// Which tokens stay in the cache after it.
    pub eviction: &'a Eviction,
    /// How tokens are chosen.
    pub sampling: &'a Sampling,
    /// Whether an end token ends the answer.
    pub ends: bool,
    /// Whether to report what the question attends to.
    pub explain: bool,
}

impl<'a> Request<'a> {
    /// Full attention while decoding, up to an end token, nothing explained.
    pub fn new(method: &'a dyn FusionMethod, sampling: &'a Sampling) -> Request<'a> {
        Request { method, eviction: Eviction::full(), sampling, ends: true, explain: false }
    }
}

/// What an answer's stream gets with every token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// Text that can be shown now; often empty, where characters or stop strings are not complete.
    pub text: &'a str,
    /// Tokens of the answer so far.
    pub tokens: usize,
    /// The token that was written; none with the text that was held back until the end.
    pub token: Option<u32>,
    /// How likely it was, where that was asked for.
    pub likely: Option<&'a Likely>,
    /// Tokens that each head's cache holds.
    pub retained: usize,
    /// Bytes allocated for keys and values.
    pub kv_bytes: usize,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it, or a stop string did.
    Stop,
    /// The limit of tokens.
    Length,
    /// The receiver of the stream did.
    Cancelled,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its token ids, the end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// What it took.
    pub account: Account,
    /// What the question attended to, if it was asked for.
    #[serde(skip)]
    pub explanation: Option<Explanation>,
}

/// An answer whose first token is chosen.
pub(crate) struct Begun {
    pub(crate) state: State,
    /// What the first token was chosen from.
    pub(crate) logits: Vec<f32>,
    pub(crate) writing: Writing,
    pub(crate) token: u32,
    pub(crate) account: Account,
    pub(crate) work: Work,
}

/// An answer at its end.
pub(crate) struct Finished {
    pub(crate) answer: Answer,
    pub(crate) work: Work,
    /// Logits of the first tokens, where they were to be kept.
    pub(crate) logits: Vec<f32>,
}

impl Begun {
    /// Goes on from the first token to the end.
    pub(crate) fn finish(
        self,
        eviction: &Eviction,
        stream: &mut dyn FnMut(Progress<'_>) -> bool,
    ) -> Result<Finished> {
        let Begun { mut state, mut writing, token, mut account, work, .. } = self;
        let first = Instant::now();
        let finish = writing.go_on(&mut state, &[token], stream)?;
        let steps = writing.tokens.len() - 1;
        account.tpot = (steps > 0).then(|| first.elapsed().as_secs_f64() / steps as f64);
        account.count_cache(&state, eviction);
        let logits = std::mem::take(&mut writing.logits);
        Ok(Finished { answer: writing.answer(finish, account, stream), work, logits })
    }
}

impl Engine {
    /// Answers a prompt. `stream` is told of every token and returns whether to go on.
    ///
    /// # Errors
    /// If the question is empty, the prompt does not fit the context, or the method or policy refuses it.
    pub fn answer(
        &self,
        prompt: &Prompt,
        request: &Request<'_>,
        mut stream: impl FnMut(Progress<'_>) -> bool,
    ) -> Result<Answer> {
        let watch = if request.explain { Watch::Explain } else { Watch::Nothing };
        let begun = self.begin(prompt, request, watch, (request.sampling.max_tokens, 0))?;
        let Finished { mut answer, work, .. } = begun.finish(request.eviction, &mut stream)?;
        answer.explanation =
            work.attention.map(|attention| self.explanation(prompt, &attention, &work.final_rows));
        Ok(answer)
    }

    /// An answer up to its first token, with room for `steps` tokens; the logits of the first `recorded` are kept.
    pub(crate) fn begin(
        &self,
        prompt: &Prompt,
        request: &Request<'_>,
        watch: Watch,
        (steps, recorded): (usize, usize),
    ) -> Result<Begun> {
        let Request { method, eviction, sampling, .. } = *request;
        sampling.check()?;
        let started = Instant::now();
        let room = self.room(prompt, steps, eviction)?;
        let Prefilled { state, logits, work, loaded } =
            self.prefill(prompt, method, eviction, room, watch)?;
        let mut writing = Writing::new(self, request, prompt, recorded);
        let token = writing.choose(&mut logits.clone(), 0);
        let mut account = self.account(prompt, &work, &loaded);
        account.ttft = (started.elapsed() - work.watching).as_secs_f64();
        account.compute_ttft = account.ttft - loaded.waited.as_secs_f64();
        Ok(Begun { state, logits, writing, token, account, work })
    }

    /// Positions for the prompt and `max_tokens` more, within the context. Where keys are rotated by their places in a
    /// bounded cache, it is these that must fit.
    ///
    /// # Errors
    /// If the question is empty, they do not fit, or the eviction policy refuses the prompt.
    pub fn room(&self, prompt: &Prompt, max_tokens: usize, eviction: &Eviction) -> Result<usize> {
        let context = self.decoder.config().context;
        if prompt.question.is_empty() {
            return Err(Error::EmptyQuestion);
        }
        let refused = Error::PromptTooLong { prompt: prompt.len(), answer: max_tokens, context };
        let Some(room) = prompt.len().checked_add(max_tokens).filter(|room| *room < u32::MAX as usize) else {
            return Err(refused);
        };
        if self.reach(prompt, eviction, room)? <= context { Ok(room) } else { Err(refused) }
    }

    /// The farthest that a key of a request of `room` tokens is from a query, plus one: what rotary scaling depends on, and
    /// what must be within the context. Where keys are rotated by their places in a bounded cache, these count.
    pub(crate) fn reach(&self, prompt: &Prompt, eviction: &Eviction, room: usize) -> Result<usize> {
        let spans = PromptSpans { system: prompt.system_span(), question: prompt.question_span() };
        let budget = eviction.policy.budget(&spans)?;
        let reindexed = budget.filter(|budget| budget.decoding && eviction.policy.sinks().is_some());
        Ok(reindexed.map_or(room, |budget| room.min(prompt.len().max(budget.most.saturating_add(1)))))
    }

    pub(crate) fn account(&self, prompt: &Prompt, work: &Work, loaded: &Loaded) -> Account {
        let documents = prompt.document_tokens();
        let rows: usize = work.document_rows.iter().sum();
        let possible = documents * work.document_rows.len();
        Account {
            prompt_tokens: prompt.len(),
            document_tokens: documents,
            cached_tokens: work.cached_tokens,
            recomputed_tokens: work.document_rows.last().copied().unwrap_or(0),
            recompute_ratio: if possible == 0 { 0.0 } else { rows as f64 / possible as f64 },
            full_layers: work
                .document_rows
                .iter()
                .filter(|rows| documents > 0 && **rows == documents)
                .count(),
            kept_tokens: work.kept_tokens,
            sequence_ratio: work.kept_tokens as f64 / prompt.len().max(1) as f64,
            undecided: work.undecided,
            operations: work.operations,
            select_seconds: work.selecting.as_secs_f64(),
            repaired_chunks: loaded.repaired,
            bytes_loaded: loaded.bytes,
            bytes_read: loaded.read,
            document_bytes: prompt.chunks.iter().map(|chunk| self.chunk_id(&chunk.tokens).bytes()).sum(),
            load_seconds: loaded.busy.as_secs_f64(),
            kv_bytes_peak: work.kv_bytes_peak,
            ..Account::default()
        }
    }
}

impl Account {
    /// Notes what the cache holds now.
    pub(crate) fn count_cache(&mut self, state: &State, eviction: &Eviction) {
        self.kv_bytes = state.kv_bytes();
        self.kv_bytes_held = state.kv_bytes_held();
        self.kv_bytes_peak = self.kv_bytes_peak.max(self.kv_bytes);
        self.kv_bytes_full = state.len * state.decoder.shape().token_bytes(state.cache.dtype());
        let retrieving = state.retrieving.as_ref().map_or(0, Retrieving::side_bytes);
        self.side_bytes = state.bounded.as_ref().map_or(retrieving, Bounded::side_bytes);
        self.retained_tokens = state.retained();
        self.kv_accounting = if eviction.per_query_head { "query_head" } else { "kv_head" };
    }
}
