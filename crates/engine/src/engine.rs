//! A model with its tokenizer, chat template and chunk store.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use refrain_fusion::{FusionMethod, Vanilla};
use refrain_kernels::{Device, DeviceFailure, Dtype, Precision};
use refrain_kv::Span;
use refrain_model::{ChatTemplate, Decoder, ModelFiles, PackedWeights, Specials, Tokenizer, ToolCallFormat};
use refrain_store::{KvQuantization, Store};

use crate::device_choice::DeviceChoice;
use crate::device_chunks::{DeviceChunkStats, DeviceChunks};
use crate::error::mib;
use crate::forward::BufferPool;
use crate::ingest::{AveragedPrefixes, PrefilledPrefix};
use crate::prefill_rate::PrefillRate;
use crate::prefix_cache::PrefixCache;
use crate::sampling::{Grammar, GrammarCompiler, StructuredOutput};
use crate::{Error, Result};

/// How an engine computes and keeps.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The device that computes.
    pub device: DeviceChoice,
    /// Threads; 0 for one a core.
    pub threads: usize,
    /// How weights are kept and multiplied; none for what the model's files come nearest to.
    pub precision: Option<Precision>,
    /// Whether packed weights are kept in a file beside the model, from which later starts read them ([`PackedWeights`]).
    pub keep_packed: bool,
    /// Most bytes of chunks that are kept in the memory of a device that has its own, so that those which many prompts use are copied there
    /// once; 0 keeps none. At most an eighth of what is free there is taken.
    pub device_chunk_bytes: u64,
    /// Type of cached keys and values.
    pub kv: Dtype,
    /// How documents' keys and values lie in the store.
    pub store_dtype: KvQuantization,
    /// Rows of a layer that one step of a prefill or an ingest computes at most (llama.cpp's physical batch): more take several
    /// steps, between which others get their turn.
    pub ubatch: usize,
    /// Most tokens of a chunk; lowered to the model's context where that is less.
    pub chunk_tokens: usize,
    /// Tokens of a document right before a chunk that it is prefilled behind, at most; their own rows are dropped. `usize::MAX` prefills a
    /// document in one piece: each of its chunks sees all that stands before it there.
    pub left_tokens: usize,
    /// Chunks of one namespace are invisible to another.
    pub namespace: String,
    /// A namespace whose chunks are used where one's own lacks them; nothing is stored there.
    pub shared: Option<String>,
    /// Whether chunks are named by their numerics ([`Engine::numerics`]), so that an answer's bits depend on this engine alone and not on
    /// which machine computed a chunk first.
    pub strict_numerics: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            device: DeviceChoice::Cpu,
            threads: 0,
            precision: None,
            keep_packed: false,
            device_chunk_bytes: 1 << 30,
            kv: Dtype::F16,
            store_dtype: KvQuantization::Exact,
            ubatch: 2048,
            chunk_tokens: 512,
            left_tokens: 0,
            namespace: String::new(),
            shared: None,
            strict_numerics: false,
        }
    }
}

/// A model, its tokenizer and chat template, and the store of its chunks. Cheap to clone; clones share everything.
#[derive(Clone, Debug)]
pub struct Engine {
    decoder: Arc<Decoder>,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    /// The template's notation of calls; found for the first prompt with tools.
    template_calls: Arc<OnceLock<Option<ToolCallFormat>>>,
    store: Store,
    settings: Settings,
    fingerprint: [u8; 32],
    numerics: Arc<str>,
    /// Layers that were found to be stable for this model.
    stable_layers: Option<Span>,
    /// The method of requests that name none.
    default_method: Arc<dyn FusionMethod>,
    /// Tokens before every chunk.
    prefix: Option<Arc<PrefilledPrefix>>,
    /// The prefixes of whose prefills a chunk is the mean.
    averaged: Option<Arc<AveragedPrefixes>>,
    buffers: Arc<BufferPool>,
    /// Chunks in the device's memory.
    device_chunks: Arc<DeviceChunks>,
    /// The speed of prefills of chunks.
    prefill_rate: Arc<PrefillRate>,
    /// Keys and values of prompts and answers.
    prefix_cache: Arc<PrefixCache>,
    /// Compiles grammars of answers; made for the first one.
    grammars: Arc<OnceLock<GrammarCompiler>>,
}

impl Engine {
    /// Opens a GGUF file or a Hugging Face folder on [`Settings::device`]. `progress(done, total)` is called as large files are hashed for
    /// the first time, and then as weights are packed.
    ///
    /// # Errors
    /// If the device is not there, cannot compute or has too little memory (with [`DeviceChoice::Auto`] the CPU computes then), the model's
    /// files are missing, truncated or unsupported, or the chunk size is 0.
    pub fn open(
        path: &Path,
        store: Store,
        settings: Settings,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Engine> {
        let open = |choice: DeviceChoice, progress: &mut dyn FnMut(usize, usize)| {
            let device = choice.open(settings.threads)?;
            Engine::open_on(&device, path, store.clone(), settings.clone(), progress)
        };
        match open(settings.device, &mut progress) {
            Err(Error::Device { .. }) if settings.device == DeviceChoice::Auto => {
                open(DeviceChoice::Cpu, &mut progress)
            }
            opened => opened,
        }
    }

    /// [`Engine::open`] on any device. Neither [`Settings::device`] nor [`Settings::threads`] is used.
    ///
    /// # Errors
    /// As for [`Engine::open`].
    pub fn open_on(
        device: &Arc<dyn Device>,
        path: &Path,
        store: Store,
        settings: Settings,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Engine> {
        let files = ModelFiles::open(path)?;
        let precision = settings.precision.map_or_else(|| files.native_precision(), Ok)?;
        check_model(&files, &**device, precision)?;
        let tokenizer = Tokenizer::open(&files)?;
        let template = ChatTemplate::open(&files)?;
        let fingerprint = files.fingerprint(&mut progress);
        let kept = settings
            .keep_packed
            .then(|| PackedWeights::beside(&files, fingerprint, precision, &**device))
            .flatten();
        let load = || Decoder::load(files, device, precision, kept.as_ref(), progress);
        let decoder = DeviceFailure::catch(load)
            .map_err(|failure| Error::Device { device: device.name(), reason: failure.to_string() })??;
        Engine::new(decoder, tokenizer, template, store, settings, fingerprint)
    }

    /// An engine of its parts. `fingerprint` identifies weights and configuration in chunk names.
    ///
    /// # Errors
    /// If the chunk size is 0.
    pub fn new(
        decoder: Decoder,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        store: Store,
        mut settings: Settings,
        fingerprint: [u8; 32],
    ) -> Result<Engine> {
        let context = decoder.config().context;
        if settings.chunk_tokens == 0 {
            return Err(Error::ChunkSize);
        }
        settings.chunk_tokens = settings.chunk_tokens.min(context.saturating_sub(1).max(1));
        let fingerprint = identity(fingerprint, decoder.precision());
        let numerics = format!("{}-{}", decoder.precision(), decoder.device().name()).into();
        let buffers = BufferPool::of(&**decoder.device());
        let device_chunks = DeviceChunks::new(&store, &**decoder.device(), settings.device_chunk_bytes);
        Ok(Engine {
            device_chunks,
            decoder: Arc::new(decoder),
            tokenizer: Arc::new(tokenizer),
            template: template.map(Arc::new),
            template_calls: Arc::default(),
            store,
            settings,
            fingerprint,
            numerics,
            stable_layers: None,
            default_method: Arc::new(Vanilla),
            prefix: None,
            averaged: None,
            buffers: Arc::new(buffers),
            prefill_rate: Arc::default(),
            prefix_cache: Arc::new(PrefixCache::new(0)),
            grammars: Arc::default(),
        })
    }

    /// An engine that shares everything with this one, and keeps documents in the store in another encoding.
    pub fn store_dtype(&self, store_dtype: KvQuantization) -> Engine {
        Engine { settings: Settings { store_dtype, ..self.settings.clone() }, ..self.clone() }
    }

    /// An engine that shares everything with this one, for the chunks of another namespace. Chunks of the `shared` namespace are
    /// used where its own lacks them.
    pub fn in_namespace(&self, namespace: &str, shared: Option<&str>) -> Engine {
        let (namespace, shared) = (namespace.to_owned(), shared.map(str::to_owned));
        Engine { settings: Settings { namespace, shared, ..self.settings.clone() }, ..self.clone() }
    }

    /// An engine that shares everything with this one, and keeps keys and values of prompts and answers for prompts that begin alike:
    /// `bytes` at most, 0 for none.
    pub fn with_prefix_cache(&self, bytes: usize) -> Engine {
        Engine { prefix_cache: Arc::new(PrefixCache::new(bytes)), ..self.clone() }
    }

    /// An engine that shares everything with this one but the prefix cache: all that it measures is computed, and nothing of it is kept.
    pub(crate) fn to_measure(&self) -> Engine {
        self.with_prefix_cache(0)
    }

    /// Has the prefix cache forget all prompts over documents of this engine's namespace, those that are under way included.
    pub fn forget_prefixes(&self) {
        self.prefix_cache.forget(&self.settings.namespace);
    }

    /// An engine that shares everything with this one, with a method for requests that name none; without it, that is vanilla.
    pub fn with_default_method(&self, default_method: Arc<dyn FusionMethod>) -> Engine {
        Engine { default_method, ..self.clone() }
    }

    /// The method of requests that name none.
    pub fn default_method(&self) -> &Arc<dyn FusionMethod> {
        &self.default_method
    }

    pub(crate) fn with_store(&self, store: Store) -> Engine {
        let device_chunks = self.device_chunks.of_store(&store, &**self.decoder.device());
        // Prompts are known by the keys of their chunks, which the other store may hold with other bytes.
        Engine { store, device_chunks, ..self.to_measure() }
    }

    pub(crate) fn with_prefixes(
        &self,
        prefix: Option<Arc<PrefilledPrefix>>,
        averaged: Option<Arc<AveragedPrefixes>>,
        settings: Settings,
    ) -> Engine {
        Engine { prefix, averaged, settings, ..self.clone() }
    }

    /// Tokens before every chunk, where they are others than BOS.
    pub(crate) fn prefix(&self) -> Option<&Arc<PrefilledPrefix>> {
        self.prefix.as_ref()
    }

    /// The prefixes of whose prefills a chunk is the mean, unless it stands right behind the system part.
    pub(crate) fn averaged(&self) -> Option<&Arc<AveragedPrefixes>> {
        self.averaged.as_ref()
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The decoder, for those that keep it.
    pub(crate) fn decoder_arc(&self) -> &Arc<Decoder> {
        &self.decoder
    }

    /// Memory of requests that are over.
    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Chunks in the device's memory.
    pub(crate) fn device_chunks(&self) -> &Arc<DeviceChunks> {
        &self.device_chunks
    }

    /// The state of the cache of chunks in the device's memory.
    pub fn device_chunk_stats(&self) -> DeviceChunkStats {
        self.device_chunks.stats()
    }

    /// The speed of prefills of chunks.
    pub(crate) fn prefill_rate(&self) -> &PrefillRate {
        &self.prefill_rate
    }

    /// Keys and values of prompts and answers, for prompts that begin alike.
    pub(crate) fn prefix_cache(&self) -> &PrefixCache {
        &self.prefix_cache
    }

    /// Bytes of keys and values that the prefix cache holds.
    pub fn prefix_cache_bytes(&self) -> usize {
        self.prefix_cache.bytes()
    }

    /// Most bytes of keys and values that the prefix cache may hold.
    pub fn prefix_cache_bound(&self) -> usize {
        self.prefix_cache.bound()
    }

    /// The chat template, if the model has one.
    pub(crate) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }

    /// The notation in which the chat template writes calls of tools; none if there is no template or it has none that is known.
    pub(crate) fn template_calls(&self) -> Option<ToolCallFormat> {
        *self.template_calls.get_or_init(|| self.template().and_then(ToolCallFormat::of_template))
    }

    /// The notation in which the model calls tools. A model whose template has none is told of its tools, and of this
    /// notation, in the system message.
    pub fn tool_call_format(&self) -> ToolCallFormat {
        self.template_calls().unwrap_or(ToolCallFormat::Hermes)
    }

    /// Layers over which SamKV's scores were found to be stable for this model.
    pub fn stable_layers(&self) -> Option<Span> {
        self.stable_layers
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The chunk store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Identifies weights, configuration and precision in chunk names.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Precision and kernels that this engine computes with, such as `bf16-avx512`. Engines of one version of the program compute the same
    /// bits of a chunk where their numerics are equal.
    pub fn numerics(&self) -> &str {
        &self.numerics
    }

    /// Lets SamKV average over these layers, from 0; without them, over the last `max(4, L/8)`.
    pub fn use_stable_layers(&mut self, layers: Option<std::ops::Range<usize>>) {
        self.stable_layers = layers.map(|layers| Span::new(layers.start, layers.end));
    }

    /// Compiles the grammar of an answer. The first call of an engine and its clones reads the whole vocabulary.
    ///
    /// # Errors
    /// If the grammar is wrong, or takes more steps or memory than its bounds allow.
    pub fn grammar(&self, output: &StructuredOutput) -> Result<Grammar> {
        let compiler = match self.grammars.get() {
            Some(compiler) => compiler,
            None => {
                let compiler = GrammarCompiler::new(&self.tokenizer, &self.ends().collect::<Vec<_>>())?;
                self.grammars.get_or_init(|| compiler)
            }
        };
        compiler.compile(output)
    }

    /// Whether a token ends an answer.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends().any(|end| end == token)
    }

    /// Tokens that end an answer.
    pub(crate) fn ends(&self) -> impl Iterator<Item = u32> {
        self.decoder.config().eos.iter().chain(self.tokenizer.eos_ids()).copied()
    }

    /// Ids of a user's text; special tokens written in it are ordinary characters.
    pub(crate) fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, Specials::Plain)?)
    }
}

/// Checks that a device can attend with a model's heads, and that its weights fit into memory where the device has its own.
fn check_model(files: &ModelFiles, device: &dyn Device, precision: Precision) -> Result<()> {
    let (head_dim, most) = (files.config().head_dim, device.most_head_dim());
    if head_dim > most {
        let reason = format!("the model's heads have {head_dim} elements, and it attends with up to {most}");
        return Err(Error::Device { device: device.name(), reason });
    }
    let Some(memory) = device.memory() else { return Ok(()) };
    let needed = Decoder::bytes_of(files, device, precision)? as u64;
    if needed <= memory.free {
        return Ok(());
    }
    let (needed, free) = (mib(needed), mib(memory.free));
    let reason = format!("the model's weights take {needed} there, and {free} are free");
    Err(Error::Device { device: device.name(), reason })
}

/// Identifies a model in the names of its chunks: weights, configuration, and the precision of computation.
pub fn identity(fingerprint: [u8; 32], precision: Precision) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("refrain 2026-11 model fingerprint and precision");
    hasher.update(&fingerprint).update(precision.to_string().as_bytes());
    *hasher.finalize().as_bytes()
}
