//! Ingest of what methods reuse of a prompt, before it is answered.

use std::collections::VecDeque;
use std::sync::Arc;

use refrain_fusion::FusionMethod;
use refrain_kernels::DeviceFailure;
use refrain_store::ChunkId;

use super::chunk_prefill::ChunkPrefill;
use super::job::{Ingest, SYSTEM_LABEL, statistics_of};
use crate::Result;
use crate::advance::Advance;
use crate::engine::Engine;
use crate::prompt::{Prompt, PromptChunk};

/// An ingest of what methods reuse of a prompt, done layer by layer. Dropping it ends the work; chunks that are stored stay.
#[derive(Debug)]
pub struct PromptIngest {
    engine: Engine,
    parts: VecDeque<Part>,
    work: Option<Work>,
}

/// A part of the prompt that is to be in the store.
#[derive(Debug)]
enum Part {
    /// Tokens of the system part.
    System(Vec<u32>),
    /// Chunks, and the methods whose statistics are kept beside them.
    Chunks(Vec<(ChunkId, PromptChunk)>, Vec<Arc<dyn FusionMethod>>),
}

#[derive(Debug)]
enum Work {
    System(Box<ChunkPrefill>),
    Chunks(Box<Ingest>),
}

impl PromptIngest {
    /// An ingest of the system part, if it is to be kept, and of nothing else.
    fn of_system(engine: &Engine, prompt: &Prompt) -> PromptIngest {
        let system = engine.keeps_system(prompt).then(|| Part::System(prompt.system.clone()));
        PromptIngest { engine: engine.clone(), parts: system.into_iter().collect(), work: None }
    }

    /// Does one step.
    ///
    /// # Errors
    /// If the store cannot be read, or the device cannot do the step. The ingest is over then.
    pub fn advance(&mut self) -> Result<Advance> {
        DeviceFailure::catch(|| self.step())?
    }

    fn step(&mut self) -> Result<Advance> {
        match self.work.take() {
            None => {
                let Some(part) = self.parts.pop_front() else { return Ok(Advance::Done) };
                self.work = self.begin(part)?;
            }
            Some(Work::System(mut prefill)) => {
                if prefill.advance(&[])? {
                    prefill.finish().store(&[])?;
                } else {
                    self.work = Some(Work::System(prefill));
                }
            }
            Some(Work::Chunks(mut ingest)) => {
                let advance = ingest.advance()?;
                if advance != Advance::Done {
                    self.work = Some(Work::Chunks(ingest));
                    return Ok(advance);
                }
            }
        }
        Ok(Advance::Progress)
    }

    /// Begins a part, unless the store has it.
    fn begin(&self, part: Part) -> Result<Option<Work>> {
        let engine = &self.engine;
        Ok(match part {
            Part::System(tokens) => {
                let (id, label) = (engine.system_id(&tokens), SYSTEM_LABEL.to_owned());
                if engine.store().contains(&id) {
                    return Ok(None);
                }
                Some(Work::System(Box::new(ChunkPrefill::start(engine, id, &[], label, false)?)))
            }
            Part::Chunks(chunks, methods) => {
                Some(Work::Chunks(Box::new(Ingest::start(engine, chunks, 0, methods, true)?)))
            }
        })
    }

    fn run(mut self) -> Result<()> {
        while self.advance()? != Advance::Done {}
        Ok(())
    }
}

impl Engine {
    /// Begins [`Engine::ingest_prompt`], to be done step by step.
    pub fn start_prompt_ingest(&self, prompt: &Prompt, methods: &[Arc<dyn FusionMethod>]) -> PromptIngest {
        if !methods.iter().any(|method| method.reuses()) {
            return PromptIngest { engine: self.clone(), parts: VecDeque::new(), work: None };
        }
        let mut ingest = PromptIngest::of_system(self, prompt);
        if !statistics_of(methods).is_empty() {
            let contexts = self.named_in(&self.contexts(prompt));
            ingest.parts.push_back(Part::Chunks(contexts, methods.to_vec()));
        }
        if methods.iter().any(|method| method.reuses() && method.statistics().is_empty()) {
            ingest.parts.push_back(Part::Chunks(self.named_in(prompt), Vec::new()));
        }
        ingest
    }

    /// Computes and stores what methods reuse of a prompt and the store does not have: its system part, its documents with
    /// statistics for the methods that keep some, and its chunks for the others. A chunk that both need is computed once.
    ///
    /// # Errors
    /// As for [`Engine::ingest`].
    pub fn ingest_prompt(&self, prompt: &Prompt, methods: &[Arc<dyn FusionMethod>]) -> Result<()> {
        self.start_prompt_ingest(prompt, methods).run()
    }

    /// Prefills and stores the system part of a prompt, if it is to be kept and is not in the store. Answers do it themselves;
    /// done before, it is no part of the first answer's time.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn ingest_system(&self, prompt: &Prompt) -> Result<()> {
        PromptIngest::of_system(self, prompt).run()
    }
}
