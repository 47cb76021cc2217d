//! A question over documents, owned from its text to its sampling.

use refrain_engine::{
    Advance, Answer, Comparison, Document, Engine, GenerateRequest, Instructions, Prompt, PromptChunk,
    Sampling, StructuredOutput, TokenStream,
};
use refrain_eviction::{Eviction, POLICIES};
use refrain_fusion::METHODS;

use crate::Result;
use crate::choice::AUTO;

/// A question over documents, with all that decides its answer. It owns its texts, so that it can wait, travel to another thread and be
/// asked again.
///
/// ```
/// use refrain::{Document, EngineOptions, Question};
///
/// # let folder = tempfile::tempdir()?;
/// # let (model, chunks) = ("../../tests/golden/tiny/llama", folder.path());
/// let engine = EngineOptions::new(model).store(chunks).open()?;
/// let documents = vec![Document { title: "Chains".into(), text: "A waxed chain runs 300 km.".into() }];
/// engine.ingest(&documents, |_| ())?;
///
/// let question = Question::new("How far does a waxed chain run?").documents(documents).method("pie").max_tokens(8);
/// let mut tokens = question.stream(&engine)?;
/// for token in &mut tokens {
///     print!("{}", token?.text);
/// }
/// let stats = &tokens.answer().expect("the stream has ended").stats;
/// assert!(stats.cached_tokens > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Question {
    /// The question.
    pub text: String,
    /// The documents, in the order of the prompt.
    pub documents: Vec<Document>,
    /// Chunks that stand before the documents, such as a search finds them.
    pub chunks: Vec<PromptChunk>,
    /// The texts around documents and question.
    pub instructions: Instructions,
    /// The fusion method with its options, as `a3:ratio=0.15`; none, or `auto`, for the engine's default.
    pub method: Option<String>,
    /// The eviction policy with its options, as `morph_kv:capacity=600`; none for full attention.
    pub evict: Option<String>,
    /// The choice of tokens.
    pub sampling: Sampling,
    /// The form that the answer has to have.
    pub output: Option<StructuredOutput>,
    /// Most tokens that are proposed at a time from what was said before, and verified in one step; 0 proposes none.
    pub speculative_tokens: usize,
    /// Whether the answer goes on past end tokens.
    pub ignore_eos: bool,
    /// Whether to report the question's attention.
    pub explain: bool,
}

impl Question {
    /// A question that is answered greedily by the engine's default method.
    pub fn new(text: impl Into<String>) -> Question {
        Question {
            text: text.into(),
            documents: Vec::new(),
            chunks: Vec::new(),
            instructions: Instructions::default(),
            method: None,
            evict: None,
            sampling: Sampling::default(),
            output: None,
            speculative_tokens: 0,
            ignore_eos: false,
            explain: false,
        }
    }

    /// A text that is answered as it is, with documents before it if there are any: for long answers and conversations.
    pub fn prompt(text: impl Into<String>) -> Question {
        let instructions = Instructions {
            before_documents: "Use these documents.\n\n".to_owned(),
            before_question: String::new(),
            ..Instructions::default()
        };
        Question { instructions, ..Question::new(text) }
    }

    /// The documents, in the order of the prompt.
    pub fn documents(self, documents: Vec<Document>) -> Question {
        Question { documents, ..self }
    }

    /// Chunks that stand before the documents, such as a [`Library`](crate::Library) finds them. Their tokens are those of the tokenizer that cut
    /// them: a model with another one has to cut the documents itself ([`tokenizer_digest`](refrain_corpus::tokenizer_digest)).
    ///
    /// ```
    /// use refrain::{Document, EngineOptions, Library, Question};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let engine = EngineOptions::new("../../tests/golden/tiny/llama").store(folder.path()).open()?;
    /// # let documents = vec![Document { title: "Chains".into(), text: "A waxed chain runs 300 km.".into() }];
    /// let library = Library::open(&engine, folder.path())?;
    /// library.put(&documents)?;
    ///
    /// let question = "How far does a waxed chain run?";
    /// let found = library.search(question, 5, false)?;
    /// let answer = Question::new(question).chunks(found.chunks).max_tokens(8).ask(&engine)?;
    /// println!("{}, from {}", answer.text, found.sources[0].title);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn chunks(self, chunks: Vec<PromptChunk>) -> Question {
        Question { chunks, ..self }
    }

    /// The system message.
    pub fn system(mut self, system: impl Into<String>) -> Question {
        self.instructions.system = Some(system.into());
        self
    }

    /// Whether a model that can do both thinks before it answers. Its thoughts are text of the answer.
    pub fn thinking(mut self, thinking: bool) -> Question {
        self.instructions.thinking = thinking;
        self
    }

    /// The fusion method with its options, as `a3:ratio=0.15`.
    pub fn method(self, method: impl Into<String>) -> Question {
        Question { method: Some(method.into()), ..self }
    }

    /// The eviction policy with its options, as `morph_kv:capacity=600`.
    pub fn evict(self, evict: impl Into<String>) -> Question {
        Question { evict: Some(evict.into()), ..self }
    }

    /// Most tokens of the answer.
    pub fn max_tokens(mut self, max_tokens: usize) -> Question {
        self.sampling.max_tokens = max_tokens;
        self
    }

    /// The choice of tokens.
    pub fn sampling(self, sampling: Sampling) -> Question {
        Question { sampling, ..self }
    }

    /// The form that the answer has to have.
    pub fn output(self, output: StructuredOutput) -> Question {
        Question { output: Some(output), ..self }
    }

    /// The question's prompt for a model.
    ///
    /// # Errors
    /// If the question is empty, or the chat template or tokenizer refuses a text.
    pub fn to_prompt(&self, engine: &Engine) -> Result<Prompt> {
        let mut chunks = self.chunks.clone();
        let found = chunks.iter().map(|chunk| chunk.document + 1).max().unwrap_or(0);
        let given = engine.chunks(&self.documents)?;
        chunks
            .extend(given.into_iter().map(|chunk| PromptChunk { document: chunk.document + found, ..chunk }));
        Ok(engine.prompt_of_chunks(chunks, &self.text, &self.instructions)?)
    }

    /// The way in which a model answers the prompt.
    ///
    /// # Errors
    /// If the method, the policy, their options, the sampling or the form of the answer are wrong.
    pub fn request(&self, engine: &Engine) -> Result<GenerateRequest> {
        self.sampling.check()?;
        self.sampling.check_biases(engine.decoder().config().vocab)?;
        let method = match &self.method {
            Some(method) if method != AUTO => METHODS.parse(method)?,
            _ => engine.default_method().clone(),
        };
        Ok(GenerateRequest {
            eviction: self.eviction()?,
            grammar: self.output.as_ref().map(|output| engine.grammar(output)).transpose()?,
            speculative_tokens: self.speculative_tokens,
            ignore_eos: self.ignore_eos,
            explain: self.explain,
            ..GenerateRequest::new(method, self.sampling.clone())
        })
    }

    fn eviction(&self) -> Result<Eviction> {
        Ok(match &self.evict {
            Some(policy) => POLICIES.parse(policy)?,
            None => Eviction::full().clone(),
        })
    }

    /// Asks. As the iterator is asked for tokens, chunks that the store lacks are prefilled and kept, the prompt is computed, and tokens are
    /// chosen; [`TokenStream::advance`] does it step by step.
    ///
    /// # Errors
    /// Those of [`Question::to_prompt`] and [`Question::request`]; if the prompt does not fit the context, or the policy refuses it.
    pub fn stream(&self, engine: &Engine) -> Result<TokenStream> {
        Ok(engine.stream(&self.to_prompt(engine)?, self.request(engine)?)?)
    }

    /// The whole answer.
    ///
    /// # Errors
    /// Those of [`Question::stream`], of the method or policy that refuses the prompt, and of a store that cannot be read.
    pub fn ask(&self, engine: &Engine) -> Result<Answer> {
        Ok(engine.answer(&self.to_prompt(engine)?, &self.request(engine)?, |_| true)?)
    }

    /// Methods side by side, over the first `tokens` tokens of vanilla's answer: time to the first token, and how far each token's
    /// distribution is from vanilla's (KL divergence in nats, share of equal likeliest tokens).
    ///
    /// ```
    /// use refrain::{Document, EngineOptions, Question};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let engine = EngineOptions::new("../../tests/golden/tiny/llama").store(folder.path()).open()?;
    /// # let documents = vec![Document { title: String::new(), text: "A waxed chain runs 300 km.".into() }];
    /// let question = Question::new("How far does a waxed chain run?").documents(documents);
    /// for row in question.compare(&engine, &["vanilla", "pie", "a3:ratio=0.5"], 4)? {
    ///     println!("{}: TTFT {:.3} s, KL {:.4}", row.method, row.stats.ttft, row.kl);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Question::ask`].
    pub fn compare(&self, engine: &Engine, methods: &[&str], tokens: usize) -> Result<Vec<Comparison>> {
        self.compare_while(engine, methods, tokens, || true)
    }

    /// [`Question::compare`] that goes on only while `goes_on` says so, which is asked after each layer of a chunk that the store lacks, and
    /// before each method: the methods until then.
    ///
    /// # Errors
    /// Those of [`Question::ask`].
    pub fn compare_while(
        &self,
        engine: &Engine,
        methods: &[&str],
        tokens: usize,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Vec<Comparison>> {
        let prompt = self.to_prompt(engine)?;
        let mut built = Vec::with_capacity(methods.len());
        for method in methods {
            built.push(if *method == AUTO {
                (AUTO.to_owned(), engine.default_method().clone())
            } else {
                let selected = METHODS.select(method)?;
                (selected.spec, selected.built)
            });
        }
        let fusions: Vec<_> = built.iter().map(|(_, method)| method.clone()).collect();
        let mut ingest = engine.start_prompt_ingest(&prompt, &fusions);
        while ingest.advance()? != Advance::Done {
            if !goes_on() {
                return Ok(Vec::new());
            }
        }
        Ok(engine.compare_while(&prompt, &built, &self.eviction()?, tokens, goes_on)?)
    }
}
