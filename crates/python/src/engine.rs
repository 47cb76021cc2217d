//! The engine.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use refrain::engine::{Advance, DeviceChoice, UnknownDevice};
use refrain::model::Specials;
use refrain::store::Limits;
use refrain::{EngineOptions, Library, Question};

use crate::answer::{Answer, TokenStream};
use crate::chunk::{Chunk, chunks};
use crate::convert::to_python;
use crate::document::{cut, prompt_chunks};
use crate::error::{RefrainError, raise};
use crate::keywords::set_keywords;
use crate::opened::Opened;

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
/// prefix_cache: most bytes of keys and values of prompts and answers that are kept for prompts that begin alike, as turns of a conversation do.
/// remote: object store by which machines share chunks and documents: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; its
/// keys come from the environment.
///
/// `close`, or the end of a `with` block, frees model and store.
#[pyclass(frozen, module = "refrain")]
pub(crate) struct Engine {
    /// None once it is closed. Work that is under way has its own reference.
    opened: Mutex<Option<Arc<Opened>>>,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        model, store = None, *, method = "auto", prefix = None, system = None, device = "cpu", threads = 0, memory = 1_073_741_824,
        disk = None, chunk_tokens = None, models = None, prefix_cache = 0, remote = None,
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
        prefix_cache: usize,
        remote: Option<String>,
    ) -> PyResult<Engine> {
        #[cfg(not(feature = "remote"))]
        if remote.is_some() {
            return Err(PyValueError::new_err("remote: this build of the module has no object stores"));
        }
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
            #[cfg(feature = "remote")]
            if let Some(remote) = remote {
                options = options.remote(refrain::store::RemoteOptions::new(remote));
            }
            (options.open(), warnings)
        });
        let warn = py.import("warnings")?;
        for warning in warnings {
            warn.call_method1("warn", (warning,))?;
        }
        let opened = Opened::new(opened.map_err(raise)?.with_prefix_cache(prefix_cache), system);
        Ok(Engine { opened: Mutex::new(Some(Arc::new(opened))) })
    }

    /// Closes the engine: model, store and kept documents are free once the work that is under way has ended.
    fn close(&self, py: Python<'_>) {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(opened));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) {
        self.close(py);
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
        let (opened, documents) = (self.opened()?, crate::document::documents(documents)?);
        let method = opened.method(method)?;
        let chunks = cut(py, &opened.engine, &documents)?;
        let mut ingest = py.detach(|| opened.engine.start_chunk_ingest(chunks, &method)).map_err(raise)?;
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
        if let Err(error) = py.detach(|| opened.in_library(|library| library.put(&documents))) {
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
        let opened = self.opened()?;
        let whole_documents = !opened.method(method)?.statistics().is_empty();
        let found = py.detach(|| {
            let found = opened.in_library(|library| library.search(question, limit, whole_documents))?;
            chunks(&opened, found)
        });
        found.map_err(raise)
    }

    /// The chunks of an ingested document by its id, as a search gives it: all, or those of some `parts`.
    #[pyo3(signature = (document, parts = None))]
    fn chunks(&self, py: Python<'_>, document: &str, parts: Option<Vec<u32>>) -> PyResult<Vec<Chunk>> {
        let opened = self.opened()?;
        let found = py.detach(|| {
            let found = opened.in_library(|library| library.document(document, parts.as_deref()))?;
            chunks(&opened, found)
        });
        found.map_err(raise)
    }

    /// The ingested documents that searches find, by their ids: `id`, `title`, `created` (seconds since 1970), `bytes`, `tokens`, `chunks`.
    fn documents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let opened = self.opened()?;
        to_python(py, &py.detach(|| opened.in_library(Library::documents)).map_err(raise)?)
    }

    /// Removes an ingested document by its id, with its chunks that no other document has.
    fn remove(&self, py: Python<'_>, document: &str) -> PyResult<()> {
        let opened = self.opened()?;
        py.detach(|| opened.in_library(|library| library.remove(document))).map_err(raise)
    }

    /// Answers a question over documents.
    ///
    /// method: fusion method with its options, as `a3:ratio=0.15`; else the engine's.
    /// evict: eviction policy with its options, as `morph_kv:capacity=600`; else full attention.
    /// Further keywords: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed, stop,
    /// min_tokens, logit_bias (by token id), logprobs (so many of the likeliest tokens), speculative_tokens, ignore_eos, thinking (of a model that
    /// can do both), history (earlier turns, a dictionary of `role` and `content` each), and one form of the answer at most: json_object,
    /// json_schema, regex, choice or grammar (llguidance's dialect of Lark). None stands for the default.
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
        let given = (documents, method, evict, system);
        answer(py, self.question(py, Question::new(question), given, sampling)?)
    }

    /// `ask`, token by token. Chunks that the store lacks are prefilled when the first token is asked for.
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
        let given = (documents, method, evict, system);
        stream(py, self.question(py, Question::new(question), given, sampling)?)
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
        let given = (documents, method, evict, system);
        answer(py, self.question(py, Question::prompt(prompt), given, sampling)?)
    }

    /// Methods side by side: time to the first token, and how far each token's distribution is from vanilla's over the first `tokens`
    /// tokens of vanilla's answer. Ctrl-C ends it after vanilla's answer or a method.
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
        let given = (Some(documents), None, evict, system);
        let Asked { opened, question } = self.question(py, Question::new(question), given, None)?;
        let methods: Vec<&str> = methods.iter().map(String::as_str).collect();
        let mut signal = Ok(());
        let rows = py.detach(|| {
            let goes_on = || {
                signal = Python::attach(|py| py.check_signals());
                signal.is_ok()
            };
            question.compare_while(&opened.engine, &methods, tokens, goes_on)
        });
        signal?;
        to_python(py, &rows.map_err(raise)?)
    }

    /// Positions that the model was trained for.
    #[getter]
    fn context(&self) -> PyResult<usize> {
        Ok(self.opened()?.engine.decoder().config().context)
    }

    /// The number of tokens of a text.
    fn count_tokens(&self, py: Python<'_>, text: &str) -> PyResult<usize> {
        Ok(self.encode(py, text)?.len())
    }

    /// The token ids of a text. Special tokens that are written in it are ordinary characters.
    fn encode(&self, py: Python<'_>, text: &str) -> PyResult<Vec<u32>> {
        let opened = self.opened()?;
        py.detach(|| opened.engine.tokenizer().encode(text, Specials::Plain)).map_err(raise)
    }

    /// The text of token ids.
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<String> {
        let opened = self.opened()?;
        Ok(py.detach(|| opened.engine.tokenizer().decode(&tokens, false)))
    }

    fn __repr__(&self) -> String {
        let Ok(opened) = self.opened() else { return "Engine(closed)".to_owned() };
        let config = opened.engine.decoder().config();
        format!("Engine({} layers, {} tokens of context)", config.num_layers(), config.context)
    }
}

/// What a question is asked of, and how: documents, method, policy, system message.
type Given<'a, 'py> = (Option<&'a Bound<'py, PyAny>>, Option<String>, Option<String>, Option<String>);

/// A question with the engine that it is asked of.
struct Asked {
    opened: Arc<Opened>,
    question: Question,
}

impl Engine {
    fn opened(&self) -> PyResult<Arc<Opened>> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.clone().ok_or_else(|| PyValueError::new_err("the engine is closed; open another one"))
    }

    fn question(
        &self,
        py: Python<'_>,
        question: Question,
        (given, method, evict, system): Given<'_, '_>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Asked> {
        let opened = self.opened()?;
        let mut question = question.chunks(prompt_chunks(py, &opened, given)?);
        question.method = method;
        question.evict = evict;
        question.instructions.system = system.or_else(|| opened.system.clone());
        if let Some(keywords) = keywords {
            set_keywords(&mut question, keywords)?;
        }
        Ok(Asked { opened, question })
    }
}

fn stream(py: Python<'_>, Asked { opened, question }: Asked) -> PyResult<TokenStream> {
    Ok(TokenStream::new(py.detach(|| question.stream(&opened.engine)).map_err(raise)?))
}

/// The whole answer; a signal ends it after a layer or a token.
fn answer(py: Python<'_>, asked: Asked) -> PyResult<Answer> {
    let answer = stream(py, asked)?.finish(py)?;
    answer.ok_or_else(|| RefrainError::new_err("the answer ended without a result"))
}
