//! The way from a request to its answers, which all interfaces share.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use futures_util::stream::{self, SelectAll, Stream, StreamExt as _};
use refrain::corpus::{Source, SourceFinder};
use refrain::engine::{
    Engine, Error as EngineError, GenerateRequest, Grammar, Instructions, Prompt, PromptChunk, Sampling,
    StructuredOutput,
};
use refrain::eviction::Eviction;
use refrain::fusion::FusionMethod;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::details::AnswerContext;
use super::extract::HeldBytes;
use super::messages::Conversation;
use super::parts::AnswerReader;
use super::request::{CompletionRequest, Continued, Documents, ToolUse};
use super::sources::{SourceResponse, sources};
use crate::TEXT_LOG;
use crate::api_error::{ApiError, Result};
use crate::app::App;
use crate::gateway::{ChunkPlan, short_key};
use crate::job::{Event, GenerateJob, Job};
use crate::random::random_seed;
use crate::tenant::Tenant;

/// The kind of text that a request asks to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// A conversation, which the chat template writes.
    Messages,
    /// Texts to go on with.
    Prompt,
}

/// A request after tokenising.
struct Prepared {
    tenant: Tenant,
    drawn: Drawn,
    /// How the answers to each prompt are sampled.
    samplings: Vec<Sampling>,
    /// The form that the answers are held to, and the field that it is of.
    form: Option<(Form, &'static str)>,
    echoed: Vec<String>,
}

/// A request's prompts, the documents that its answers draw on, and its tools.
struct Drawn {
    prompts: Vec<Prompt>,
    sources: Vec<Source>,
    tools: Option<Arc<ToolUse>>,
}

/// The form that answers are held to.
#[derive(Debug, PartialEq)]
enum Form {
    Format(StructuredOutput),
    Calls(Arc<ToolUse>),
    /// Calls, or else the format.
    Either(Arc<ToolUse>, StructuredOutput),
}

impl Form {
    /// The form in the notation of the engine's model. Of calls it takes as long as their grammar.
    ///
    /// # Errors
    /// If there is no such tool.
    fn output(self, engine: &Engine) -> Result<StructuredOutput> {
        Ok(match self {
            Form::Format(format) => format,
            Form::Calls(tools) => tools.output(engine)?,
            Form::Either(tools, format) => StructuredOutput::Either(vec![tools.output(engine)?, format]),
        })
    }
}

/// Answers on their way.
pub(super) struct Asked {
    pub(super) engine: Engine,
    pub(super) context: AnswerContext,
    /// Whether log probabilities are asked for.
    pub(super) logprobs: bool,
    /// The number of answers to each prompt.
    pub(super) answers_each: usize,
    /// The text that the answers to each prompt begin with; none where they begin with no other text than their own.
    pub(super) echoed: Vec<String>,
    /// A reader of each answer; those to one prompt follow one another.
    pub(super) readers: Vec<AnswerReader>,
    pub(super) events: AnswerEvents,
    /// The bytes of the request, for those who need it until its end.
    pub(super) held: HeldBytes,
}

/// Prepares a request, whose bytes are held, and submits a job for each of its answers.
///
/// # Errors
/// If the request is wrong, exceeds a limit, or the server takes no more.
pub(super) async fn ask(
    app: &App,
    tenant: Tenant,
    (request, held): (CompletionRequest, HeldBytes),
    input: Input,
) -> Result<Asked> {
    request.check(&app.state.options.served_model_name)?;
    let options = &request.refrain;
    let method = app.method("refrain.method", options.method.as_ref())?;
    let policy = app.policy("refrain.evict", options.evict.as_ref())?;
    app.state.scheduler.check_queue()?;
    let (explain, ignore_eos) = (options.explain, request.ignore_eos.unwrap_or(false));
    let (answers_each, arrived) = (request.answers(), held.since());
    let max_tokens_field = request.max_tokens_field();
    let namespace = tenant.namespace().to_owned();
    let work = {
        let (app, method, eviction) = (app.clone(), method.built.clone(), policy.built.clone());
        move || Ok((prepare(&app, tenant, &request, input, (&*method, &eviction))?, held))
    };
    let (prepared, held) = app.preprocess(&namespace, app.deadline(arrived), work).await?;
    let Prepared { tenant, drawn: Drawn { prompts, sources, tools }, samplings, form, echoed } = prepared;
    if let Some((_, field)) = form.as_ref().filter(|_| ignore_eos) {
        let message =
            format!("ignore_eos cannot be given together with {field}: it says where the answer ends");
        return Err(ApiError::field("ignore_eos", message));
    }
    let (grammar, held) = compile(app, &tenant, form, held).await?;
    let sampling = samplings.first().ok_or_else(lost)?;
    let context = AnswerContext {
        method: method.spec,
        evict: policy.spec,
        seed: (sampling.temperature > 0.0).then_some(sampling.seed as i64),
        sources: sources.iter().map(SourceResponse::from).collect(),
        explain,
    };
    let tokens = prompts.iter().map(Prompt::len).sum::<usize>();
    tracing::info!(
        method = context.method,
        evict = context.evict,
        documents = sources.len(),
        tokens,
        "asked"
    );
    let logprobs = sampling.logprobs.is_some();
    let (grammar, grammar_field) = grammar.map_or((None, ""), |(grammar, field)| (Some(grammar), field));
    let mut jobs = Vec::with_capacity(prompts.len() * answers_each);
    for (prompt, sampling) in prompts.into_iter().map(Arc::new).zip(&samplings) {
        tracing::trace!(target: TEXT_LOG, prompt = app.state.engine.tokenizer().decode(&prompt.ids(), false));
        for index in 0..answers_each {
            let seed = sampling.seed.wrapping_add(index as u64);
            let sampling = Sampling { seed, ..sampling.clone() };
            let request = GenerateRequest {
                eviction: policy.built.clone(),
                ignore_eos,
                grammar: grammar.clone(),
                explain: explain.is_wanted(),
                ..GenerateRequest::new(method.built.clone(), sampling)
            };
            jobs.push(GenerateJob { prompt: prompt.clone(), request, grammar_field });
        }
    }
    let engine = tenant.engine.clone();
    let reader = |job: &GenerateJob| {
        let has_form = job.request.grammar.is_some();
        AnswerReader::new(&engine, tools.as_deref(), job.prompt.thinking, has_form)
    };
    let readers = jobs.iter().map(reader).collect();
    let named = |error: ApiError| match error.param.as_deref() {
        Some("max_tokens") => error.renamed(max_tokens_field),
        _ => error,
    };
    let events = AnswerEvents::submit(app, &tenant, jobs, arrived).map_err(named)?;
    Ok(Asked { engine, context, logprobs, answers_each, echoed, readers, events, held })
}

/// The error of a job that ended without a word.
pub(super) fn lost() -> ApiError {
    ApiError::internal(&"a job ended without an answer")
}

/// The chunks that a request's prompt is made of.
///
/// # Errors
/// If the request is wrong.
pub(super) async fn plan(
    app: &App,
    tenant: Tenant,
    (request, held): (CompletionRequest, HeldBytes),
    input: Input,
) -> Result<ChunkPlan> {
    request.check(&app.state.options.served_model_name)?;
    let method = app.method("refrain.method", request.refrain.method.as_ref())?;
    let whole_documents = !method.built.statistics().is_empty();
    let (namespace, deadline) = (tenant.namespace().to_owned(), app.deadline(held.since()));
    let work = {
        let app = app.clone();
        move || {
            let _held = held;
            let Drawn { prompts, .. } = draw(&app, &tenant, &request, input, whole_documents)?;
            // Several prompts have the same documents.
            let keys = prompts.first().map(|prompt| tenant.engine.keys_in(prompt, whole_documents));
            let chunks = keys.iter().flatten().map(|(key, tokens)| (short_key(key), *tokens)).collect();
            let prompt_tokens = prompts.iter().map(Prompt::len).sum();
            let charge = if method.built.reuses() { app.state.scheduler.load().2.charge } else { 1.0 };
            Ok(ChunkPlan { chunks, prompt_tokens, charge })
        }
    };
    app.preprocess(&namespace, deadline, work).await
}

/// Tokenises a request, and finds the documents that its answer draws on.
fn draw(
    app: &App,
    tenant: &Tenant,
    request: &CompletionRequest,
    input: Input,
    whole_documents: bool,
) -> Result<Drawn> {
    let engine = &tenant.engine;
    let conversation = (input == Input::Messages).then(|| request.conversation()).transpose()?;
    let continued = if conversation.is_none() { request.prompts()? } else { Vec::new() };
    let tools = request.tool_use()?;
    if tools.is_some() && input == Input::Prompt {
        return Err(ApiError::field("tools", "tools are for chats: a text to continue calls none"));
    }
    let asked =
        conversation.as_ref().map_or(0, Conversation::bytes) + tools.as_ref().map_or(0, ToolUse::bytes);
    let bytes = continued.iter().map(Continued::bytes).sum::<usize>()
        + request.documents.as_ref().map_or(0, Documents::bytes);
    app.state.scheduler.check_text(asked + bytes)?;
    let mut prompts = continued.iter().map(|text| text.compose(engine)).collect::<Result<Vec<Prompt>>>()?;
    let question = match (&conversation, continued.as_slice()) {
        (Some(conversation), _) => conversation.question().to_owned(),
        (None, [text]) => text.text(engine),
        (None, _) if request.searches() => {
            let message = "a search is for one prompt: give the documents of several ones by id or as texts";
            return Err(ApiError::field("documents", message));
        }
        (None, _) => String::new(),
    };
    let finder = SourceFinder { corpus: &app.state.corpus, engine, whole_documents };
    let documents = (request.documents.as_ref(), app.state.options.max_documents_per_request);
    let mut sources = sources(&finder, documents, &question, request.refrain.search)?;
    let chunks = sources.iter().enumerate().flat_map(|(index, source)| source.prompt_chunks(index));
    let chunks: Vec<PromptChunk> = chunks.collect();
    let (context, answer) = (engine.decoder().config().context, request.max_tokens()?.unwrap_or(1));
    match conversation {
        Some(conversation) => {
            let listed = tools.as_ref().map(|tools| tools.tools.clone()).unwrap_or_default();
            let around = app.state.options.instructions.clone();
            let instructions = Instructions {
                system: conversation.system,
                tools: listed,
                thinking: request.thinking()?,
                ..around
            };
            prompts.push(engine.prompt_of_turns(chunks, &conversation.turns, &instructions)?);
        }
        None => {
            let tokens = chunks.iter().map(|chunk| chunk.tokens.len()).sum::<usize>();
            let lengths = prompts.iter().map(|prompt| prompt.len() + tokens);
            // Each prompt gets a copy of the documents. A search has one prompt, and may leave some of them out.
            if let Some(prompt) = lengths.max().filter(|length| *length > context && !request.searches()) {
                app.state.scheduler.check_tokens(prompt.saturating_add(answer))?;
                return Err(EngineError::PromptTooLong { prompt, answer, context }.into());
            }
            prompts.iter_mut().for_each(|prompt| prompt.chunks.clone_from(&chunks));
        }
    }
    if whole_documents && request.searches() {
        for prompt in &mut prompts {
            // The last documents are those that match the question least.
            while sources.len() > 1 && prompt.len().saturating_add(answer) > context {
                sources.pop();
                prompt.chunks.retain(|chunk| chunk.document < sources.len());
            }
        }
    }
    Ok(Drawn { prompts, sources, tools: tools.map(Arc::new) })
}

/// Tokenises a request, and finds what its answer draws on and is held to.
fn prepare(
    app: &App,
    tenant: Tenant,
    request: &CompletionRequest,
    input: Input,
    (method, eviction): (&dyn FusionMethod, &Eviction),
) -> Result<Prepared> {
    let drawn = draw(app, &tenant, request, input, !method.statistics().is_empty())?;
    let engine = &tenant.engine;
    let default = |prompt| app.state.scheduler.default_tokens(engine, prompt, (method, eviction));
    let seed = random_seed();
    let sampling = |prompt| request.sampling(default(prompt), || seed);
    let samplings = drawn.prompts.iter().map(sampling).collect::<Result<Vec<Sampling>>>()?;
    let vocab = engine.decoder().config().vocab;
    samplings.iter().try_for_each(|sampling| sampling.check_biases(vocab))?;
    let form = form(request, drawn.tools.as_ref())?;
    let echoed = match input {
        Input::Prompt if request.echoes()? => {
            request.prompts()?.into_iter().map(|text| text.text(engine)).collect()
        }
        Input::Prompt | Input::Messages => Vec::new(),
    };
    Ok(Prepared { tenant, drawn, samplings, form, echoed })
}

/// The form of a request's answers, and the field that it is of. Answers that must be calls are nothing else; those that may be calls, and have a format, are
/// either calls or of that format.
///
/// # Errors
/// If a format is wrong.
fn form(request: &CompletionRequest, tools: Option<&Arc<ToolUse>>) -> Result<Option<(Form, &'static str)>> {
    Ok(match (tools, request.structured_output()?) {
        (None, None) => None,
        (None, Some((field, format))) => Some((Form::Format(format), field)),
        (Some(_), Some(("structured_outputs", _))) => {
            let message = "structured_outputs cannot be given together with tools: response_format can";
            return Err(ApiError::field("structured_outputs", message));
        }
        (Some(tools), _) if tools.is_forced() => Some((Form::Calls(tools.clone()), "tools")),
        (Some(_), None) => None,
        (Some(tools), Some((field, format))) => Some((Form::Either(tools.clone(), format), field)),
    })
}

/// The grammar of a form, and the field that it is of. The bytes of the request are held until it is compiled.
///
/// # Errors
/// If the form is wrong, or no answer satisfies it.
async fn compile(
    app: &App,
    tenant: &Tenant,
    form: Option<(Form, &'static str)>,
    held: HeldBytes,
) -> Result<(Option<(Grammar, &'static str)>, HeldBytes)> {
    let Some((form, field)) = form else { return Ok((None, held)) };
    let (engine, deadline) = (tenant.engine.clone(), app.deadline(held.since()));
    let work = move || {
        let named = |error: EngineError| ApiError { param: Some(field.to_owned()), ..error.into() };
        Ok((Some((engine.grammar(&form.output(&engine)?).map_err(named)?, field)), held))
    };
    app.compile_grammar(tenant.namespace(), deadline, work).await
}

/// The events of one answer, with its index.
type IndexedEvents = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// The events of a request's answers.
pub(super) struct AnswerEvents(SelectAll<IndexedEvents>);

impl AnswerEvents {
    /// Submits the jobs of a request that arrived then, one for each of its answers.
    ///
    /// # Errors
    /// If a job exceeds a limit, the queue has no room for all, or the server is shutting down.
    fn submit(
        app: &App,
        tenant: &Tenant,
        answers: Vec<GenerateJob>,
        arrived: Instant,
    ) -> Result<AnswerEvents> {
        let (mut jobs, mut events) = (Vec::new(), Vec::new());
        for job in answers {
            let (sender, received) = unbounded_channel();
            jobs.push((Job::Generate(Box::new(job)), sender));
            events.push(received);
        }
        app.state.scheduler.submit(&tenant.engine, jobs, arrived, None)?;
        Ok(AnswerEvents::of(events))
    }

    /// The events of answers, in the order of their indices.
    pub(super) fn of(received: Vec<UnboundedReceiver<Event>>) -> AnswerEvents {
        let of_answer = |(index, received)| -> IndexedEvents {
            Box::pin(stream::unfold(Some(received), move |received| async move {
                let mut received: UnboundedReceiver<Event> = received?;
                let event = received.recv().await.unwrap_or_else(|| Event::Failed(lost()));
                let is_last = matches!(event, Event::Finished(_) | Event::Failed(_));
                Some(((index, event), (!is_last).then_some(received)))
            }))
        };
        AnswerEvents(stream::select_all(received.into_iter().enumerate().map(of_answer)))
    }

    /// The next event; none once all answers are complete.
    pub(super) async fn next(&mut self) -> Option<(usize, Event)> {
        self.0.next().await
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Patterns of a tool's parameters are read with its grammar, and not where requests are tokenised.
    #[test]
    fn the_form_of_calls_is_written_when_its_grammar_is() {
        let tool = json!({ "type": "function", "function": { "name": "torque" } });
        let format = json!({ "type": "json_object" });
        for (choice, field) in [("required", "tools"), ("auto", "response_format")] {
            let body = json!({ "tools": [tool], "tool_choice": choice, "response_format": format });
            let request: CompletionRequest = serde_json::from_value(body).unwrap();
            let tools = Arc::new(request.tool_use().unwrap().unwrap());
            let expected = match choice {
                "required" => Form::Calls(tools.clone()),
                _ => Form::Either(tools.clone(), StructuredOutput::JsonObject),
            };
            assert_eq!(form(&request, Some(&tools)).unwrap(), Some((expected, field)));
        }
    }
}
