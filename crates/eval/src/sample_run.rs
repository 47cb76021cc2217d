//! One sample of a run, answered by every variant beside vanilla.

use std::time::{SystemTime, UNIX_EPOCH};

use refrain::engine::{
    Answer, DeviceFailure, Engine, Error as EngineError, GenerateRequest, Oracle, Parts, Prefix, Prompt,
    Reference, Sampling,
};
use refrain::store::KvQuantization;

use crate::error::{Error, Result};
use crate::record::{Cost, Fidelity, Record, VanillaCost};
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
    /// Vanilla's answers to the prompt with its chunks in other orders.
    reordered: Vec<(Vec<usize>, Reference)>,
    /// An engine for each prefix and encoding, whose chunks are there, or the reason why they are not.
    engines: Vec<((Prefix, KvQuantization), std::result::Result<Engine, String>)>,
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
        SampleRun {
            engine,
            job,
            sample,
            variants,
            options,
            scorer,
            reference: None,
            reordered: Vec::new(),
            engines: Vec::new(),
        }
    }

    /// The records with the answers of their variants, or with errors. A record that has an answer already is only scored.
    pub(crate) fn answer(&mut self, blanks: Vec<(&Variant, Record)>) -> Vec<Record> {
        let wanted = blanks.iter().filter(|(_, blank)| blank.cost.is_none());
        let variants: Vec<&Variant> = wanted.map(|(variant, _)| *variant).collect();
        let mut answers = match variants.as_slice() {
            [] => Vec::new(),
            // Steps of the engine tell a device's failure as an error; references and oracles call the device between them.
            variants => DeviceFailure::catch(|| self.try_answer(variants))
                .unwrap_or_else(|failure| Err(EngineError::from(failure).into()))
                .unwrap_or_else(|error| {
                    let error = error.to_string();
                    variants.iter().map(|_| Err(Error::Invalid(error.clone()))).collect()
                }),
        }
        .into_iter();
        let finish = |(_, blank): (_, Record)| {
            let mut record = Record { error: None, judge_error: None, ..blank };
            if record.cost.is_none() {
                match answers.next() {
                    Some(Ok((answer, fidelity))) => {
                        record.answer_room = self.answer_room();
                        record.cost = Some(Cost { vanilla: self.vanilla_cost(), ..self.cost(&answer) });
                        (record.answer, record.fidelity) = (answer.text, Some(fidelity));
                    }
                    Some(Err(error)) => record.error = Some(error.to_string()),
                    None => {}
                }
            }
            self.scored(record)
        };
        blanks.into_iter().map(finish).collect()
    }

    fn scored(&self, mut record: Record) -> Record {
        if record.error.is_none() {
            let LoadedTask { scoring, first_line, .. } = *self.job;
            let scores =
                |scorer: &Scorer<'_>| scorer.scores(scoring, first_line, self.sample, &record.answer);
            let (scores, judge) = match scores(self.scorer) {
                Err(error @ Error::Judge { .. }) => {
                    record.judge_error = Some(error.to_string());
                    (scores(&Scorer { judge: None, ..*self.scorer }), None)
                }
                scores => (scores, self.job.about.judge.clone()),
            };
            match scores {
                Ok(scores) => (record.scores, record.judge) = (scores, judge),
                Err(error) => record.error = Some(error.to_string()),
            }
        }
        record.finished = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        record
    }

    /// Answers of variants, decoded together. The reference is made where there is none yet.
    fn try_answer(&mut self, variants: &[&Variant]) -> Result<Vec<Result<(Answer, Fidelity)>>> {
        if self.reference.is_none() {
            let prompt = self.prompt()?;
            let sampling = self.sampling(&prompt);
            let reference = reference_to(self.engine, &prompt, &sampling, self.options)?;
            for variant in self.variants {
                let of = storage(variant);
                if !self.engines.iter().any(|(known, _)| *known == of) {
                    let engine = self.ingested(&prompt, &of).map_err(|error| error.to_string());
                    self.engines.push((of, engine));
                }
            }
            self.reference = Some((prompt, reference));
        }
        let Some((prompt, reference)) = &self.reference else {
            return Err(Error::Invalid("vanilla has not answered".to_owned()));
        };
        let sampling = self.sampling(prompt);
        let is_known = |variant: &Variant| variant.is_reference() && sampling.temperature == 0.0;
        let request = |variant: &Variant| {
            let of = storage(variant);
            let known = self.engines.iter().find(|(known, _)| *known == of);
            let engine = known.map_or(Ok(self.engine), |(_, engine)| engine.as_ref());
            let method = GenerateRequest::new(variant.fusion.clone(), sampling.clone());
            let request = GenerateRequest { eviction: variant.eviction.clone(), ..method };
            engine.map(|engine| (engine, request)).map_err(|reason| Error::Invalid(reason.clone()))
        };
        let asked = || variants.iter().filter(|variant| !is_known(variant));
        let alone = |variant: &Variant| variant.fusion.reorders() || variant.oracle.is_some();
        let together: Vec<_> =
            asked().filter(|variant| !alone(variant)).filter_map(|variant| request(variant).ok()).collect();
        let mut together = Engine::answers_beside(prompt, &together, reference)?.into_iter();
        let mut answers = Vec::new();
        for variant in asked() {
            let (engine, request) = match request(variant) {
                Ok(request) => request,
                Err(error) => {
                    answers.push(Err(error));
                    continue;
                }
            };
            if let Some(oracle) = variant.oracle {
                answers.push(beside_oracle(prompt, (engine, oracle), request, reference));
            } else if variant.fusion.reorders() {
                let vanilla = |prompt: &Prompt| reference_to(self.engine, prompt, &sampling, self.options);
                let known = (reference, &mut self.reordered);
                answers.push(beside_reordered(prompt, engine, request, known, vanilla));
            } else {
                answers.extend(together.next().map(|answer| answer.map_err(Error::from)));
            }
        }
        let mut answers = answers.into_iter();
        let answer = |variant: &&Variant| {
            if is_known(variant) {
                let positions = reference.positions(self.engine);
                let fidelity = Fidelity { top1: 1.0, positions, ..Fidelity::default() };
                return Some(Ok((reference.answer.clone(), fidelity)));
            }
            Some(answers.next()?.and_then(|(answer, found)| Ok((answer, checked(fidelity(found))?))))
        };
        Ok(variants.iter().filter_map(answer).collect())
    }

    /// An engine whose store has the chunks of a prompt behind a prefix in an encoding, for all variants that read those.
    fn ingested(&self, prompt: &Prompt, of: &(Prefix, KvQuantization)) -> Result<Engine> {
        let (prefix, store_dtype) = of;
        let engine = self.engine.store_dtype(*store_dtype);
        let engine = engine.with_prefix(prefix, || Ok(prompt.system.clone()))?;
        let readers = self.variants.iter().filter(|variant| storage(variant) == *of);
        let methods: Vec<_> = readers.map(|variant| variant.fusion.clone()).collect();
        engine.ingest_prompt(prompt, &methods)?;
        Ok(engine)
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

    /// Tokens of the context beside a prompt, where these are fewer than the sample's limit. None for a prompt that leaves none, which
    /// the engine refuses.
    fn room(&self, prompt: &Prompt) -> Option<usize> {
        let room = self.engine.decoder().config().context.saturating_sub(prompt.len());
        (0 < room && room < self.sample.max_tokens).then_some(room)
    }

    /// The [room](SampleRun::room) behind the prompt that was answered.
    fn answer_room(&self) -> Option<usize> {
        self.reference.as_ref().and_then(|(prompt, _)| self.room(prompt))
    }

    fn cost(&self, answer: &Answer) -> Cost {
        let config = self.engine.decoder().config();
        Cost::of(&answer.stats, config.heads / config.kv_heads)
    }

    /// The cost of the reference, where it is vanilla's whole answer. That of a sampled task has its forced tokens alone.
    fn vanilla_cost(&self) -> Option<VanillaCost> {
        let (_, reference) = self.reference.as_ref().filter(|_| self.job.temperature == 0.0)?;
        Some(VanillaCost::from(&self.cost(&reference.answer)))
    }

    fn sampling(&self, prompt: &Prompt) -> Sampling {
        Sampling {
            temperature: self.job.temperature as f32,
            top_p: self.job.top_p as f32,
            max_tokens: self.room(prompt).unwrap_or(self.sample.max_tokens),
            min_tokens: self.sample.min_tokens,
            stop: self.sample.stop.clone(),
            seed: self.options.seed,
            ..Sampling::default()
        }
    }
}

/// How a variant's chunks are stored.
fn storage(variant: &Variant) -> (Prefix, KvQuantization) {
    (variant.prefix.clone(), variant.store_dtype)
}

/// Vanilla's greedy answer. A sampled task needs it only for its first tokens, which variants are forced to.
fn reference_to(
    engine: &Engine,
    prompt: &Prompt,
    sampling: &Sampling,
    options: &RunOptions,
) -> Result<Reference> {
    let RunOptions { forced, maps, .. } = *options;
    let greedy = sampling.temperature == 0.0;
    let most = if greedy { sampling.max_tokens } else { sampling.max_tokens.min(forced) };
    Ok(engine.reference(prompt, &Sampling { max_tokens: most, ..sampling.clone() }, forced, maps)?)
}

/// One answer beside a reference.
type Beside = (Answer, refrain::engine::Fidelity);

/// One answer that is decoded alone.
fn beside_alone(
    prompt: &Prompt,
    engine: &Engine,
    request: GenerateRequest,
    reference: &Reference,
) -> Result<Beside> {
    let mut answers = Engine::answers_beside(prompt, &[(engine, request)], reference)?;
    let nothing = || Error::Invalid("the engine has not answered".to_owned());
    Ok(answers.pop().ok_or_else(nothing)??)
}

fn beside_oracle(
    prompt: &Prompt,
    (engine, oracle): (&Engine, Oracle),
    request: GenerateRequest,
    reference: &Reference,
) -> Result<Beside> {
    let (engine, method) = engine.oracle(prompt, &request.method, oracle)?;
    beside_alone(prompt, &engine, GenerateRequest { method, ..request }, reference)
}

/// An answer to the prompt in the method's order, which is another prompt for `vanilla` as well. References to prompts in other
/// orders are kept.
fn beside_reordered(
    prompt: &Prompt,
    engine: &Engine,
    request: GenerateRequest,
    (reference, reordered): (&Reference, &mut Vec<(Vec<usize>, Reference)>),
    vanilla: impl FnOnce(&Prompt) -> Result<Reference>,
) -> Result<Beside> {
    let Some(order) = engine.chunk_order(prompt, &request.method)? else {
        return beside_alone(prompt, engine, request, reference);
    };
    if reordered.iter().all(|(known, _)| *known != order) {
        reordered.push((order.clone(), vanilla(&prompt.in_order(&order))?));
    }
    let known = reordered.iter().find(|(known, _)| *known == order);
    beside_alone(prompt, engine, request, known.map_or(reference, |(_, reference)| reference))
}

fn checked(fidelity: Fidelity) -> Result<Fidelity> {
    if !fidelity.kl.is_finite() || fidelity.attention_l2.iter().any(|l2| !l2.is_finite()) {
        return Err(Error::Invalid("the model's logits or attention are not numbers".to_owned()));
    }
    Ok(fidelity)
}

fn fidelity(found: refrain::engine::Fidelity) -> Fidelity {
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
