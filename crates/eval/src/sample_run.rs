//! One sample of a run, answered by every variant beside vanilla.

use std::time::{SystemTime, UNIX_EPOCH};

use refrain_engine::{
    Answer, Engine, GenerateRequest, Instructions, Parts, Prefix, Prompt, Reference, Sampling,
};
use refrain_store::KvQuantization;

use crate::error::{Error, Result};
use crate::record::{Cost, Fidelity, Record};
use crate::sample::Sample;
use crate::scoring::Scorer;
use crate::tasks::LoadedTask;
use crate::variant::{RunOptions, Variant};

/// One sample, answered by several variants.
pub(crate) struct SampleRun<'a> {
    engine: &'a Engine,
    job: &'a LoadedTask,
    sample: &'a Sample,
    variants: &'a [Variant],
    options: &'a RunOptions,
    scorer: &'a Scorer<'a>,
    /// The prompt and vanilla's answer, after the first variant.
    reference: Option<(Prompt, Reference)>,
    /// An engine for each prefix and encoding, whose chunks are there.
    engines: Vec<((Prefix, KvQuantization), Engine)>,
}

impl<'a> SampleRun<'a> {
    pub(crate) fn new(
        engine: &'a Engine,
        job: &'a LoadedTask,
        sample: &'a Sample,
        variants: &'a [Variant],
        options: &'a RunOptions,
        scorer: &'a Scorer<'a>,
    ) -> SampleRun<'a> {
        SampleRun { engine, job, sample, variants, options, scorer, reference: None, engines: Vec::new() }
    }

    /// The record `blank` with the variant's answer, or with an error. A record that has an answer already is only scored.
    pub(crate) fn answer(&mut self, variant: &Variant, blank: Record) -> Record {
        let mut record = Record { error: None, ..blank };
        if record.cost.is_none() {
            match self.try_answer(variant) {
                Ok((answer, fidelity)) => {
                    let config = self.engine.decoder().config();
                    record.cost = Some(Cost::of(&answer.stats, config.heads / config.kv_heads));
                    (record.answer, record.fidelity) = (answer.text, Some(fidelity));
                }
                Err(error) => record.error = Some(error.to_string()),
            }
        }
        if record.error.is_none() {
            let LoadedTask { scoring, first_line, .. } = *self.job;
            match self.scorer.scores(scoring, first_line, self.sample, &record.answer) {
                Ok(scores) => record.scores = scores,
                Err(error) => record.error = Some(error.to_string()),
            }
        }
        record.finished = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        record
    }

    fn try_answer(&mut self, variant: &Variant) -> Result<(Answer, Fidelity)> {
        let sampling = self.sampling();
        if self.reference.is_none() {
            let prompt = self.prompt()?;
            // A sampled task needs the greedy answer only for its first tokens, which variants are forced to.
            let greedy = sampling.temperature == 0.0;
            let most =
                if greedy { sampling.max_tokens } else { sampling.max_tokens.min(self.options.forced) };
            let asked = Sampling { max_tokens: most, ..sampling.clone() };
            let reference = self.engine.reference(&prompt, &asked, self.options.forced, self.options.maps)?;
            for variant in self.variants {
                let of = |variant: &Variant| (variant.prefix.clone(), variant.store_dtype);
                if self.engines.iter().any(|(known, _)| *known == of(variant)) {
                    continue;
                }
                let prefix = match &variant.prefix {
                    Prefix::System => prompt.system.clone(),
                    // The template's first token is that of the sample's own prompt.
                    Prefix::Bos if self.engine.tokenizer().bos().is_none() => {
                        prompt.system[..1.min(prompt.system.len())].to_vec()
                    }
                    other => self.engine.prefix_tokens(other, &Instructions::default())?,
                };
                let engine = self.engine.store_dtype(variant.store_dtype).behind(&prefix)?;
                let alike = self.variants.iter().filter(|other| of(other) == of(variant));
                let methods: Vec<_> = alike.map(|variant| variant.fusion.clone()).collect();
                engine.ingest_prompt(&prompt, &methods)?;
                self.engines.push((of(variant), engine));
            }
            self.reference = Some((prompt, reference));
        }
        let of = (variant.prefix.clone(), variant.store_dtype);
        let engine = self.engines.iter().find(|(known, _)| *known == of).map(|(_, engine)| engine);
        let (Some((prompt, reference)), Some(engine)) = (&self.reference, engine) else {
            return Err(Error::Invalid("vanilla has not answered".to_owned()));
        };
        let (answer, fidelity) = if variant.is_reference() && sampling.temperature == 0.0 {
            let positions = reference.positions(self.engine);
            let fidelity = Fidelity { top1: 1.0, positions, ..Fidelity::default() };
            (reference.answer.clone(), fidelity)
        } else {
            let request = GenerateRequest {
                eviction: variant.eviction.clone(),
                ..GenerateRequest::new(variant.fusion.clone(), sampling.clone())
            };
            let (answer, found) = engine.answer_beside(prompt, &request, reference)?;
            (answer, fidelity(found))
        };
        if !fidelity.kl.is_finite() || fidelity.attention_l2.iter().any(|l2| !l2.is_finite()) {
            return Err(Error::Invalid("the model's logits or attention are not numbers".to_owned()));
        }
        Ok((answer, fidelity))
    }

    fn prompt(&self) -> Result<Prompt> {
        let Sample { before, documents, question, answer_prefix, chat, .. } = self.sample;
        Ok(self.engine.compose(&Parts {
            before,
            documents,
            // A single text may be cut anywhere.
            apart: documents.len() == 1,
            question,
            answer_prefix,
            chat: *chat,
        })?)
    }

    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.job.temperature as f32,
            top_p: self.job.top_p as f32,
            max_tokens: self.sample.max_tokens,
            min_tokens: self.sample.min_tokens,
            stop: self.sample.stop.clone(),
            seed: self.options.seed,
            ..Sampling::default()
        }
    }
}

fn fidelity(found: refrain_engine::Fidelity) -> Fidelity {
    Fidelity {
        kl: found.agreement.kl,
        kl_first: found.agreement.kl_first,
        top1: found.agreement.top1,
        positions: found.agreement.positions,
        attention_l2: found.attention_l2,
        hit_rate_40: found.hits.map(|hits| hits.best),
        hit_rate: found.hits.map(|hits| hits.as_many),
    }
}
