//! The engine.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use refrain::engine::{DeviceChoice, UnknownDevice};
use refrain::model::Specials;
use refrain::store::{KvQuantization, Limits, UnknownKvQuantization, hex};
use refrain::{EngineOptions, Library, Question};

use crate::answer::{Answer, TokenStream};
use crate::chunk::{Chunk, chunks};
use crate::convert::to_python;
use crate::error::raise;
use crate::ingest::{flush, ingest};
use crate::keywords::{argument, count};
use crate::opened::{Opened, open};
use crate::process::free_detached;
use crate::question::{Asked, Given};

/// A model with its chunk store. It may be shared between threads, but not with a process that is forked from this one.
///
/// model: a known name, a GGUF file, a folder of Hugging Face, or `hf:ORG/NAME[:FILE]`.
/// store: folder of stored chunks; else `REFRAIN_STORE`, or the program's own.
/// method: method of questions that name none; `auto` is the one that is safe for the model.
/// prefix: `none`, `bos`, `system`, `averaged` or `text:FILE`; else the one that is safe for the model.
/// system: system message of the prompts to come.
/// device: `cpu`, `cuda` (an NVIDIA GPU; `cuda:1` is the second; experimental: tested under emulation, on an H200 and an H100), or `auto`.
/// threads: 0 for one a core.
/// memory, disk: most bytes of chunks in memory (1 GiB) and in the folder (no bound).
/// chunk_tokens: most tokens of a chunk (512).
/// store_dtype: type of stored keys and values: `exact` (as computed), `q8` (8 bits an element) or `q4` (4 bits, KIVI).
/// models: folder of models that are known by name; else `REFRAIN_MODELS`, or `~/.cache/refrain/models`.
/// prefix_cache: most bytes of keys and values of prompts and answers that are kept for prompts that begin alike, as turns of a conversation do; 0 keeps none.
/// remote: object store by which machines share chunks and documents: `s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; its
/// keys come from the environment.
/// keep_packed: whether packed weights are kept in a file beside the model, as large as they are in memory, from which later engines and the program
/// read them.
///
/// `close`, or the end of a `with` block, frees model and store.
#[pyclass(frozen, weakref, module = "refrain")]
pub(crate) struct Engine {
    /// None once it is closed. Work that is under way has its own reference.
    opened: Mutex<Option<Arc<Opened>>>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        free_detached(self.opened.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (
        model, store = None, *, method = "auto", prefix = None, system = None, device = "cpu", threads = 0, memory = 1_073_741_824,
        disk = None, chunk_tokens = None, models = None, prefix_cache = 0, remote = None, keep_packed = true,
        store_dtype = "exact",
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
        threads: i64,
        memory: i64,
        disk: Option<i64>,
        chunk_tokens: Option<i64>,
        models: Option<PathBuf>,
        prefix_cache: i64,
        remote: Option<String>,
        keep_packed: bool,
        store_dtype: &str,
    ) -> PyResult<Engine> {
        #[cfg(not(feature = "remote"))]
        if remote.is_some() {
            return Err(PyValueError::new_err("remote: this build of the module has no object stores"));
        }
        let mut limits = Limits::memory(count("memory", memory)?);
        if let Some(disk) = disk {
            limits.disk = count("disk", disk)?;
        }
        let (threads, prefix_cache) = (count("threads", threads)?, count("prefix_cache", prefix_cache)?);
        let device: DeviceChoice =
            device.parse().map_err(|error: UnknownDevice| PyValueError::new_err(error.to_string()))?;
        let store_dtype: KvQuantization = store_dtype
            .parse()
            .map_err(|error: UnknownKvQuantization| PyValueError::new_err(error.to_string()))?;
        let mut settings =
            refrain::Settings { device, threads, keep_packed, store_dtype, ..refrain::Settings::default() };
        if let Some(chunk_tokens) = chunk_tokens {
            settings.chunk_tokens = count("chunk_tokens", chunk_tokens)?;
        }
        let instructions =
            refrain::Instructions { system: system.clone(), ..refrain::Instructions::default() };
        let model = model.into_os_string().into_string();
        let model =
            model.map_err(|model| PyValueError::new_err(format!("{} is no UTF-8", model.display())))?;
        let prefix =
            prefix.map(str::parse).transpose().map_err(|error: String| PyValueError::new_err(error))?;
        let engine = open(py, || {
            let mut options = EngineOptions::new(model)
                .limits(limits)
                .settings(settings)
                .instructions(instructions)
                .method(method);
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
            options
        })?;
        let opened = Opened::new(engine.with_prefix_cache(prefix_cache), system);
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
    /// documents: `Document` or `str` each; those without text are left out.
    /// method: the method whose statistics of whole documents are kept, too, if it needs some; else the engine's.
    /// progress: is called with tokens computed and tokens to compute, some times a second at most.
    /// Returns counts, bytes and seconds. `not_stored` is the reason why chunks are not in the store's folder, and `unpublished` the number of
    /// documents that are not in the object store yet; both are told as warnings of Python, too.
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
        ingest(py, &opened, &documents, &method, progress)
    }

    /// Waits until all chunks and documents that were ingested are in the object store of `remote`, and takes up what other machines have changed.
    /// Without one, there is nothing to wait for.
    ///
    /// timeout: most seconds; None waits as long as the object store takes something.
    /// Raises TimeoutError once the time is over, and RefrainError if the object store does not answer, or refuses. What is not uploaded then is uploaded
    /// later, also by another engine that has the store's folder open.
    #[pyo3(signature = (timeout = None))]
    fn flush(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        flush(py, &*self.opened()?, timeout)
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
        limit: i64,
        method: Option<&str>,
    ) -> PyResult<Vec<Chunk>> {
        let (opened, limit) = (self.opened()?, count("limit", limit)?);
        let whole_documents = !opened.method(method)?.statistics().is_empty();
        let found = opened.read_library(py, |library| library.search(question, limit, whole_documents))?;
        py.detach(|| chunks(&opened, found)).map_err(raise)
    }

    /// The chunks of an ingested document by its id, as a search gives it: all, or those of some `parts`.
    #[pyo3(signature = (document, parts = None))]
    fn chunks(
        &self,
        py: Python<'_>,
        document: &str,
        parts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Chunk>> {
        let opened = self.opened()?;
        let parts: Option<Vec<u32>> = parts.map(|parts| argument("parts", parts)).transpose()?;
        let found = opened.read_library(py, |library| library.document(document, parts.as_deref()))?;
        py.detach(|| chunks(&opened, found)).map_err(raise)
    }

    /// The ingested documents that searches find, by their ids: `id`, `title`, `created` (seconds since 1970), `bytes`, `tokens`, `chunks`.
    fn documents<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let opened = self.opened()?;
        to_python(py, &opened.read_library(py, Library::documents)?)
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
    /// system: system message; else the engine's.
    /// Further keywords, of which None stands for the default:
    /// max_tokens (256), min_tokens (0): bounds on the tokens of the answer.
    /// temperature (0): 0 takes the likeliest token.
    /// seed: of the tokens that are drawn where temperature is above 0; without one, or with -1, a random one is drawn,
    /// which `Answer.seed` tells.
    /// top_k (0): keeps so many of the likeliest tokens; 0 and -1 keep all.
    /// top_p (1): keeps the likeliest tokens until their probabilities sum to it; 0 keeps one.
    /// min_p (0): keeps tokens that are at least so many times as likely as the likeliest.
    /// repetition_penalty (1), frequency_penalty (0), presence_penalty (0), logit_bias (none, by token id).
    /// stop (none): a text that ends the answer, or several.
    /// logprobs (none): so many of the likeliest tokens, with each token of the answer.
    /// speculative_tokens (0): so many are proposed at a time from what was said before; the answer is the same.
    /// ignore_eos (False): the answer goes on past the model's end tokens.
    /// thinking (False): a model that can do both thinks first.
    /// history (none): earlier turns, a dictionary of `role` and `content` each.
    /// One form of the answer at most: json_object, json_schema, regex, choice or grammar (llguidance's dialect of Lark).
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
        self.question(py, Question::new(question), given, sampling)?.answer(py)
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
        self.question(py, Question::new(question), given, sampling)?.stream(py)
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
        self.question(py, Question::prompt(prompt), given, sampling)?.answer(py)
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
        methods: &Bound<'py, PyAny>,
        evict: Option<String>,
        system: Option<String>,
        tokens: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        if tokens == 0 {
            return Err(PyValueError::new_err("tokens = 0 is out of range; choose at least 1"));
        }
        if methods.is_instance_of::<PyString>() {
            return Err(PyTypeError::new_err("methods is a list of methods, not one of them"));
        }
        let methods: Vec<String> = argument("methods", methods)?;
        let (given, tokens) = ((Some(documents), None, evict, system), count("tokens", tokens)?);
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

    /// Names the model's weights, configuration and precision: equal models have equal ones, on every machine.
    #[getter]
    fn fingerprint(&self) -> PyResult<String> {
        Ok(hex::encode(&self.opened()?.engine.fingerprint()))
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
    fn decode(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>) -> PyResult<String> {
        let (opened, tokens) = (self.opened()?, argument::<Vec<u32>>("tokens", tokens)?);
        Ok(py.detach(|| opened.engine.tokenizer().decode(&tokens, false)))
    }

    fn __repr__(&self) -> String {
        let Some(opened) = self.current() else { return "Engine(closed)".to_owned() };
        let config = opened.engine.decoder().config();
        format!("Engine({} layers, {} tokens of context)", config.num_layers(), config.context)
    }
}

impl Engine {
    /// The engine with its documents; none once it is closed.
    fn current(&self) -> Option<Arc<Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// # Errors
    /// If it is closed, or was opened by the process that this one was forked from.
    fn opened(&self) -> PyResult<Arc<Opened>> {
        let closed = || PyValueError::new_err("the engine is closed; open another one");
        let opened = self.current().ok_or_else(closed)?;
        opened.process.check()?;
        Ok(opened)
    }

    fn question(
        &self,
        py: Python<'_>,
        question: Question,
        given: Given<'_, '_>,
        keywords: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Asked> {
        Asked::new(py, self.opened()?, question, given, keywords)
    }
}
