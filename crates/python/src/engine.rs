//! The engine.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use refrain::engine::{Advance, DeviceChoice, UnknownDevice};
use refrain::fusion::FusionMethod;
use refrain::model::Message;
use refrain::store::Limits;
use refrain::{AUTO, EngineOptions, Library, Question, StructuredOutput};

use crate::answer::{Answer, TokenStream};
use crate::chunk::{Chunk, chunks};
use crate::convert::{to_json, to_python};
use crate::document::prompt_chunks;
use crate::error::{RefrainError, raise};

/// A model with its chunk store. It may be shared between threads.
///
/// model: a known name, a GGUF file, a folder of Hugging Face, or `hf:ORG/NAME[:FILE]`.
/// store: folder of stored chunks; else the program's own.
/// method: method of questions that name none; `auto` is the one that is safe for the model.
/// prefix: `none`, `bos`, `system`, `averaged` or `text:FILE`; else the one that is safe for the model.
/// system: system message of the prompts to come.
/// device: `cpu`, `cuda` (an NVIDIA GPU; `cuda:1` is the second; experimental: tested under emulation, on an H200 and an H100), or `auto`.
/// threads: 0 for one a core.
/// memory, disk: most bytes of chunks in memory and in the folder.
/// models: folder of models that are known by name.
#[pyclass(frozen, module = "refrain")]
pub(crate) struct Engine {
    engine: refrain::Engine,
    /// The kept documents, once they are needed: one program at a time has them open.
    library: Mutex<Option<Library>>,
    system: Option<String>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        model, store = None, *, method = "auto", prefix = None, system = None, device = "cpu", threads = 0, memory = 1_073_741_824,
        disk = None, chunk_tokens = None, models = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        store: Option<PathBuf>,
        method: &str,
        prefix: Option<&str>,
        system: Option<String>,
        device: &str,
        threads: usize,
        memory: u64,
        disk: Option<u64>,
        chunk_tokens: Option<usize>,
        models: Option<PathBuf>,
    ) -> PyResult<Engine> {
        let mut limits = Limits::memory(memory);
        limits.disk = disk.unwrap_or(limits.disk);
        let device: DeviceChoice =
            device.parse().map_err(|error: UnknownDevice| PyValueError::new_err(error.to_string()))?;
        let mut settings = refrain::Settings { device, threads, ..refrain::Settings::default() };
        settings.chunk_tokens = chunk_tokens.unwrap_or(settings.chunk_tokens);
        let instructions =
            refrain::Instructions { system: system.clone(), ..refrain::Instructions::default() };
        let model = model.into_os_string().into_string();
        let model =
            model.map_err(|model| PyValueError::new_err(format!("{} is no UTF-8", model.display())))?;
        let prefix =
            prefix.map(str::parse).transpose().map_err(|error: String| PyValueError::new_err(error))?;
        let (opened, warnings) = py.detach(|| {
            let mut warnings = Vec::new();
            let mut options = EngineOptions::new(model)
                .limits(limits)
                .settings(settings)
                .instructions(instructions)
                .method(method)
                .on_warning(|text| warnings.push(text.to_owned()));
            if let Some(prefix) = prefix {
                options = options.prefix(prefix);
            }
            if let Some(store) = store {
                options = options.store(store);
            }
            if let Some(models) = models {
                options = options.models(models);
            }
            (options.open(), warnings)
        });
        let warn = py.import("warnings")?;
        for warning in warnings {
            warn.call_method1("warn", (warning,))?;
        }
        Ok(Engine { engine: opened.map_err(raise)?, library: Mutex::default(), system })
    }

    /// Prefills documents, and keeps them and their chunks. What is there already is not computed again.
    ///
    /// documents: `Document` or `str` each.
    /// progress: is called with tokens computed and tokens to compute.
    /// Returns counts, bytes and seconds.
    #[pyo3(signature = (documents, *, method = None, progress = None))]
    fn ingest<'py>(
        &self,
        py: Python<'py>,
        documents: &Bound<'py, PyAny>,
        method: Option<&str>,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let documents = crate::document::documents(documents)?;
        let method = self.method(method)?;
        let mut ingest = self.engine.start_ingest(&documents, &method).map_err(raise)?;
        loop {
            // Each step is a layer, after which a signal may end the work.
            let step = py.detach(|| ingest.advance()).map_err(raise)?;
            py.check_signals()?;
            if let (Some(progress), Some(news)) = (progress, ingest.new_progress()) {
                progress.call1((news.done, news.total))?;
            }
            if step == Advance::Done {
                break;
            }
        }
        let report = py.detach(|| ingest.finish());
        // The chunks are of use without it, so that the ingest has not failed.
        if let Err(error) = py.detach(|| self.in_library(|library| library.put(&documents))) {
            let warning = format!("search does not find these documents: {error}");
            py.import("warnings")?.call_method1("warn", (warning,))?;
        }
        to_python(py, &report)
    }

    /// The chunks of ingested documents whose words fit a question best, those of one document together. They can stand in the documents of
    /// `ask`, `stream`, `generate` and `compare`, where they are reused as they were prefilled.
    ///
    /// limit: most chunks.
    /// method: the method that is going to answer. For those that need whole documents, all chunks of the documents come.
    #[pyo3(signature = (question, limit = 5, *, method = None))]
    fn search(
        &self,
        py: Python<'_>,
        question: &str,
        limit: usize,
        method: Option<&str>,
    ) -> PyResult<Vec<Chunk>> {
        let whole_documents = !self.method(method)?.statistics().is_empty();
        let found = py.detach(|| self.in_library(|library| library.search(question, limit, whole_documents)));
        Ok(chunks(&self.engine, found.map_err(raise)?))
    }

    /// The chunks of an ingested document by its id, as a search gives it: all, or those of some `parts`.
    #[pyo3(signature = (document, parts = None))]
    fn chunks(&self, py: Python<'_>, document: &str, parts: Option<Vec<u32>>) -> PyResult<Vec<Chunk>> {
        let found = py.detach(|| self.in_library(|library| library.document(document, parts.as_deref())));
        Ok(chunks(&self.engine, found.map_err(raise)?))
    }

    /// The ingested documents that searches find, by their ids: `id`, `title`, `created` (seconds since 1970), `bytes`, `tokens`, `chunks`.
    fn documents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &py.detach(|| self.in_library(Library::documents)).map_err(raise)?)
    }

    /// Removes an ingested document by its id, with its chunks that no other document has.
    fn remove(&self, py: Python<'_>, document: &str) -> PyResult<()> {
        py.detach(|| self.in_library(|library| library.remove(document))).map_err(raise)
    }

    /// Answers a question over documents.
    ///
    /// method: fusion method with its options, as `a3:ratio=0.15`; else the engine's.
    /// evict: eviction policy with its options, as `morph_kv:capacity=600`; else full attention.
    /// Further keywords: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed, stop,
    /// min_tokens, json_schema, regex, choice, speculative_tokens, ignore_eos, thinking (of a model that can do both), and history: earlier turns, a dictionary of `role` and `content` each.
    #[pyo3(signature = (question, documents = None, *, method = None, evict = None, system = None, **sampling))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn ask(
        &self,
        py: Python<'_>,
        question: String,
        documents: Option<&Bound<'_, PyAny>>,
        method: Option<String>,
        evict: Option<String>,
        system: Option<String>,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Answer> {
        let asked = self.question(Question::new(question), (documents, method, evict, system), sampling)?;
        self.answer(py, &asked)
    }

    /// `ask`, token by token.
    #[pyo3(signature = (question, documents = None, *, method = None, evict = None, system = None, **sampling))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn stream(
        &self,
        py: Python<'_>,
        question: String,
        documents: Option<&Bound<'_, PyAny>>,
        method: Option<String>,
        evict: Option<String>,
        system: Option<String>,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<TokenStream> {
        let asked = self.question(Question::new(question), (documents, method, evict, system), sampling)?;
        Ok(TokenStream::new(py.detach(|| asked.stream(&self.engine)).map_err(raise)?))
    }

    /// Answers a text as it is, with documents before it if there are any: for long answers. The keywords are those of `ask`.
    #[pyo3(signature = (prompt, documents = None, *, method = None, evict = None, system = None, **sampling))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: String,
        documents: Option<&Bound<'_, PyAny>>,
        method: Option<String>,
        evict: Option<String>,
        system: Option<String>,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Answer> {
        let asked = self.question(Question::prompt(prompt), (documents, method, evict, system), sampling)?;
        self.answer(py, &asked)
    }

    /// Methods side by side: time to the first token, and how far each token's distribution is from vanilla's over the first `tokens`
    /// tokens of vanilla's answer.
    #[pyo3(signature = (question, documents, methods, *, evict = None, system = None, tokens = 32))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn compare<'py>(
        &self,
        py: Python<'py>,
        question: String,
        documents: &Bound<'py, PyAny>,
        methods: Vec<String>,
        evict: Option<String>,
        system: Option<String>,
        tokens: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let asked = self.question(Question::new(question), (Some(documents), None, evict, system), None)?;
        let methods: Vec<&str> = methods.iter().map(String::as_str).collect();
        let rows = py.detach(|| asked.compare(&self.engine, &methods, tokens)).map_err(raise)?;
        to_python(py, &rows)
    }

    /// Positions that the model was trained for.
    #[getter]
    fn context(&self) -> usize {
        self.engine.decoder().config().context
    }

    /// The number of tokens of a text.
    fn count_tokens(&self, text: &str) -> PyResult<usize> {
        let specials = refrain::model::Specials::Plain;
        Ok(self.engine.tokenizer().encode(text, specials).map_err(raise)?.len())
    }

    fn __repr__(&self) -> String {
        let config = self.engine.decoder().config();
        format!("Engine({} layers, {} tokens of context)", config.num_layers(), config.context)
    }
}

/// What a question is asked of, and how: documents, method, policy, system message.
type Asked<'a, 'py> = (Option<&'a Bound<'py, PyAny>>, Option<String>, Option<String>, Option<String>);

impl Engine {
    fn method(&self, name: Option<&str>) -> PyResult<Arc<dyn FusionMethod>> {
        match name.filter(|name| *name != AUTO) {
            Some(name) => refrain::fusion::METHODS.parse(name).map_err(raise),
            None => Ok(self.engine.default_method().clone()),
        }
    }

    /// Works with the kept documents of the store's folder, which stay open from then on.
    fn in_library<T>(
        &self,
        work: impl FnOnce(&Library) -> refrain::corpus::Result<T>,
    ) -> refrain::corpus::Result<T> {
        let mut library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = match library.take() {
            Some(opened) => opened,
            None => match self.engine.store().folder() {
                Some(folder) => Library::open(&self.engine, folder)?,
                None => Library::in_memory(&self.engine)?,
            },
        };
        work(library.insert(opened))
    }

    fn question(
        &self,
        question: Question,
        (given, method, evict, system): Asked<'_, '_>,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Question> {
        let mut question = question.chunks(prompt_chunks(&self.engine, given)?);
        question.method = method;
        question.evict = evict;
        question.instructions.system = system.or_else(|| self.system.clone());
        for (name, value) in sampling.into_iter().flatten() {
            keyword(&mut question, &name.extract::<String>()?, &value)?;
        }
        Ok(question)
    }

    /// The whole answer; a signal ends it after a token.
    fn answer(&self, py: Python<'_>, question: &Question) -> PyResult<Answer> {
        let mut stream = py.detach(|| question.stream(&self.engine)).map_err(raise)?;
        while let Some(token) = py.detach(|| stream.next()) {
            token.map_err(raise)?;
            py.check_signals()?;
        }
        let answer = stream.answer().cloned();
        answer.map(Answer::new).ok_or_else(|| RefrainError::new_err("the answer ended without a result"))
    }
}

/// Turns of a conversation.
fn history(turns: &Bound<'_, PyAny>) -> PyResult<Vec<Message>> {
    let turn = |turn: Bound<'_, PyAny>| {
        let field = |name: &str| turn.get_item(name)?.extract::<String>();
        Ok(Message::text(&field("role")?, &field("content")?))
    };
    turns.try_iter()?.map(|item| turn(item?)).collect()
}

/// Sets what a keyword names.
fn keyword(question: &mut Question, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    let sampling = &mut question.sampling;
    match name {
        "max_tokens" => sampling.max_tokens = value.extract()?,
        "min_tokens" => sampling.min_tokens = value.extract()?,
        "temperature" => sampling.temperature = value.extract()?,
        "top_k" => sampling.top_k = value.extract()?,
        "top_p" => sampling.top_p = value.extract()?,
        "min_p" => sampling.min_p = value.extract()?,
        "repetition_penalty" => sampling.repetition_penalty = value.extract()?,
        "frequency_penalty" => sampling.frequency_penalty = value.extract()?,
        "presence_penalty" => sampling.presence_penalty = value.extract()?,
        "seed" => sampling.seed = value.extract()?,
        "stop" => {
            sampling.stop = value.extract::<String>().map(|stop| vec![stop]).or_else(|_| value.extract())?
        }
        "history" => question.instructions.history = history(value)?,
        "thinking" => question.instructions.thinking = value.extract()?,
        "speculative_tokens" => question.speculative_tokens = value.extract()?,
        "ignore_eos" => question.ignore_eos = value.extract()?,
        "json_schema" => question.output = Some(StructuredOutput::JsonSchema(to_json(value)?)),
        "regex" => question.output = Some(StructuredOutput::Regex(value.extract()?)),
        "choice" => question.output = Some(StructuredOutput::Choice(value.extract()?)),
        _ => {
            return Err(pyo3::exceptions::PyTypeError::new_err(format!(
                "'{name}' is no keyword of an answer"
            )));
        }
    }
    Ok(())
}
