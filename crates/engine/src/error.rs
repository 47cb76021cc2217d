use std::path::PathBuf;

/// Errors between a request and its answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model's files, tokenizer or chat template.
    #[error(transparent)]
    Model(#[from] refrain_model::ModelError),
    /// The chunk store.
    #[error(transparent)]
    Store(#[from] refrain_store::StoreError),
    /// The instruction set that the environment asks for.
    #[error(transparent)]
    Isa(#[from] refrain_kernels::IsaError),
    /// A device that is not there or cannot compute.
    #[error("cannot compute on {device}: {reason}")]
    Device {
        /// The device that was chosen, as `cuda:1`, or its name.
        device: String,
        /// The reason why it cannot compute.
        reason: String,
    },
    /// A step that the device could not do: its memory has run out, or it has failed for good.
    #[error(transparent)]
    DeviceFailure(#[from] refrain_kernels::DeviceFailure),
    /// A prompt, or a chunk, that is not begun since the device has too little memory for it.
    #[error(
        "{tokens} tokens need {} of {device}'s memory, {} of it for keys and values, and {} are free: \
         give a shorter prompt or fewer documents, a lower --max-tokens, --kv of 16 bits, --evict with a capacity, or another --device",
        mib(*kv + *activations), mib(*kv), mib(*free)
    )]
    DeviceMemory {
        /// Name of the device.
        device: String,
        /// Tokens of the prompt or chunk, and of its answer.
        tokens: usize,
        /// Bytes of keys and values.
        kv: u64,
        /// Bytes of all else that the tokens take while they are computed.
        activations: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The fusion method or its options.
    #[error(transparent)]
    Fusion(#[from] refrain_fusion::Error),
    /// The eviction policy or its options.
    #[error(transparent)]
    Eviction(#[from] refrain_eviction::Error),
    /// A prefix of chunks whose text cannot be read.
    #[error("cannot read the prefix in {}: {reason}", path.display())]
    PrefixText {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A question without a token.
    #[error("the question is empty; ask something")]
    EmptyQuestion,
    /// More tokens than the model can attend to.
    #[error(
        "the prompt has {prompt} tokens and the answer may take {answer}, but the model's context is {context}"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the answer may take.
        answer: usize,
        /// The model's context.
        context: usize,
    },
    /// Keys and values that are in memory and cannot be brought in all the same.
    #[error("chunks that are whole in memory could not be placed in the cache; please report it")]
    Loading,
    /// A prefix that leaves too little room for chunks.
    #[error(
        "a prefix of {prefix} tokens takes more than half of the model's context of {context}; choose a shorter one"
    )]
    PrefixTooLong {
        /// Tokens of the prefix.
        prefix: usize,
        /// The model's context.
        context: usize,
    },
    /// A thread that could not be started.
    #[error("cannot start a thread: {0}; the system allows too few of them")]
    Thread(#[from] std::io::Error),
    /// Chunks of no token.
    #[error("chunks of 0 tokens hold nothing; choose at least 1")]
    ChunkSize,
    /// A method that returned tokens out of order or without those that must be computed.
    #[error(
        "fusion method {method} returned tokens that are not an ascending subset with every uncached token ({why})"
    )]
    Tokens {
        /// The method.
        method: String,
        /// The condition that they break.
        why: &'static str,
    },
    /// A method whose selection of tokens cannot be computed.
    #[error("fusion method {method} returned a selection that cannot be computed ({why})")]
    Selection {
        /// The method.
        method: String,
        /// The condition that it breaks.
        why: &'static str,
    },
    /// Results of the model's layers that are NaN or infinite.
    #[error(
        "{}: the {what} of a prompt are not all finite numbers: the model's files are damaged, or numbers pass the range of \
         their type; fetch the model anew, or choose f32 for --compute and --kv",
        model.display()
    )]
    NotFinite {
        /// The model's file or folder.
        model: PathBuf,
        /// The results.
        what: &'static str,
    },
    /// A grammar that is wrong, or takes more steps or memory than its bounds allow.
    #[error("the answer cannot follow its grammar: {reason}")]
    Grammar {
        /// The fault.
        reason: String,
    },
    /// A sampling option out of its range.
    #[error("{option} = {value} is out of range; choose {expected}")]
    Sampling {
        /// The option.
        option: &'static str,
        /// Its value.
        value: f64,
        /// The values that are accepted.
        expected: &'static str,
    },
    /// A bias of a token that the model does not have.
    #[error("the model has {vocab} tokens, and none of id {token}")]
    LogitBias {
        /// Tokens of the model.
        vocab: usize,
        /// The id.
        token: u32,
    },
}

/// Bytes as people read them.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
