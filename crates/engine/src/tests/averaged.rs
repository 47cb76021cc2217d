//! Chunks that are the mean of several prefills.

use refrain_fusion::{
    Drift, FusionMethod, InfoFlow, LayerView, Pass, PassPlan, Pie, PrefillInputs, SamKv, Vanilla,
};
use refrain_kernels::Dtype;
use refrain_store::Scope;

use super::*;
use crate::{Document, GenerateRequest, Prefix, Sampling};

fn averaged(engine: &Engine, prompt: &Prompt) -> Engine {
    engine.with_prefix(&Prefix::Averaged, || Ok(prompt.system.clone())).unwrap()
}

#[test]
fn a_chunk_is_the_mean_of_what_it_is_behind_each_text_and_the_first_one_is_exact() {
    for kv in [Dtype::F32, Dtype::F16] {
        let engine = tiny_engine("llama", exact(kv));
        let prompt = random_prompt(&engine, 7, &[50, 30, 41], 9, 3);
        let averaging = averaged(&engine, &prompt);
        averaging.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
        let behind = |prefix: &[u32], chunk: usize| {
            let engine = engine.behind(prefix).unwrap();
            engine.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
            let id = engine.chunk_id(&prompt.chunks[chunk]);
            keys_and_values(&engine, &id)
        };
        let stored = |chunk: usize| {
            let id = averaging.chunk_id_in(&prompt, chunk);
            keys_and_values(&averaging, &id)
        };
        assert_eq!(stored(0), behind(&prompt.system, 0), "{kv:?}: right behind the system part");
        let texts = &averaging.averaged().unwrap().prefixes;
        for chunk in [1, 2] {
            let prefills: Vec<Vec<f32>> = texts.iter().map(|text| behind(&text.tokens, chunk)).collect();
            let mean: Vec<f32> = prefills[0].iter().zip(&prefills[1]).map(|(a, b)| 0.5 * (a + b)).collect();
            let scale = mean.iter().fold(0f32, |most, x| most.max(x.abs()));
            let tolerance = scale * if kv == Dtype::F32 { 1e-6 } else { 1e-3 };
            assert!(max_difference(&stored(chunk), &mean) <= tolerance, "{kv:?}: chunk {chunk}");
            assert!(max_difference(&prefills[0], &mean) > 10.0 * tolerance, "the texts make no difference");
        }
        let all = averaging.store().list(Scope::All).unwrap().chunks.len();
        averaging.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
        assert_eq!(averaging.store().list(Scope::All).unwrap().chunks.len(), all, "nothing is stored twice");
    }
}

#[test]
fn one_chunk_alone_is_vanilla_to_the_bit_and_no_token_of_the_first_is_chosen() {
    everywhere(|engine| {
        // The texts that are averaged over are tokens of the tokenizer, of which some tiny models have no embeddings.
        if engine.tokenizer().vocab_size() > engine.decoder().config().vocab {
            return;
        }
        let prompt = random_prompt(engine, 7, &[90], 9, 3);
        let averaging = averaged(engine, &prompt);
        let vanilla = prefill(&averaging, &prompt, &Vanilla, prompt.len());
        assert_eq!(prefill(&averaging, &prompt, &Drift::default(), prompt.len()).logits, vanilla.logits);
        let prompt = random_prompt(engine, 7, &[40, 50], 9, 3);
        let drift = Drift { charge: 1.0, ..Drift::default() };
        let rows = prefill(&averaged(engine, &prompt), &prompt, &drift, prompt.len()).stats.final_rows;
        assert!(rows[0] >= 47, "{rows:?}");
    });
}

/// Asks for the chunks in the opposite order.
#[derive(Clone, Debug)]
struct Backwards(InfoFlow);

#[derive(Debug)]
struct BackwardsProbe(Box<dyn Pass>, usize);

impl FusionMethod for Backwards {
    fn start(&self, inputs: &Arc<PrefillInputs>) -> refrain_fusion::Result<Box<dyn Pass>> {
        let pass = self.0.start(inputs)?;
        let chunks = inputs.layout.chunks.len();
        Ok(if inputs.reordered { pass } else { Box::new(BackwardsProbe(pass, chunks)) })
    }

    fn reorders(&self) -> bool {
        true
    }
}

impl Pass for BackwardsProbe {
    fn plan(&self) -> &PassPlan {
        self.0.plan()
    }

    fn observe(&mut self, layer: &LayerView<'_>) -> refrain_fusion::Result<Vec<u32>> {
        self.0.observe(layer)
    }

    fn order(&self) -> Option<Vec<usize>> {
        Some((0..self.1).rev().collect())
    }
}

/// A chunk that was prefilled for another place is not exact at the first one.
#[test]
fn in_another_order_no_chunk_passes_for_exact_that_is_not() {
    let engine = tiny_engine("llama", exact(Dtype::F32));
    let prompt = random_prompt(&engine, 7, &[40, 50, 45], 9, 3);
    // With all tokens chosen that may be chosen, only an exact chunk has tokens that are not.
    let all = Backwards(InfoFlow { ratio: 1.0, reorder: true, ..InfoFlow::default() });
    let rows = |engine: &Engine| prefill(engine, &prompt, &all, prompt.len()).stats.final_rows;
    assert_eq!(rows(&averaged(&engine, &prompt))[0], 7, "the mean that stands first now is computed");
    assert_eq!(
        rows(&engine.behind(&prompt.system).unwrap())[0],
        7 + 45,
        "behind the system part it is exact there"
    );
}

/// A library keeps means; the chunk that a prompt has first is computed for its place when a prompt has it there.
#[test]
fn what_ingest_keeps_of_documents_is_all_that_an_answer_needs() {
    let engine = tiny_engine("llama", Settings { chunk_tokens: 64, ..exact(Dtype::F16) });
    let sentence = |years| format!("The harbour of the town is {years} years old, and its pier is long. ");
    let documents = [Document { title: String::new(), text: (1..6).map(sentence).collect() }];
    let prompt = engine.prompt(&documents, "Why?", &Default::default()).unwrap();
    for method in [shared(Drift::default()), shared(SamKv::default())] {
        let averaging = averaged(&engine, &prompt);
        averaging.ingest_system(&prompt).unwrap();
        let library = averaging.ingest_for(&documents, &method, |_| ()).unwrap();
        let chunks = if method.statistics().is_empty() { prompt.chunks.len() } else { 1 };
        assert_eq!(
            (library.chunks, library.computed, library.tokens),
            (chunks, chunks, prompt.document_tokens())
        );
        assert_eq!(library.computed_tokens, 2 * library.tokens, "each chunk is prefilled twice");
        let to_answer =
            averaging.start_ingest_to_answer(&prompt.chunks, &method).unwrap().run(|_| ()).unwrap();
        assert_eq!((to_answer.chunks, to_answer.computed), (chunks, 1), "the first chunk, for its place");
        let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
        let request = GenerateRequest::new(method.clone(), sampling);
        let stats = averaging.answer(&prompt, &request, |_| false).unwrap().stats;
        assert_eq!(stats.prefilled_chunks, 0, "{method:?}");
        // The document's keys name every chunk that the store has of it, the one for the first place included.
        let keys = averaging.keys_of(&prompt.chunks, true);
        let system = averaging.system_id(&prompt.system).key();
        let stored = averaging.store().list(Scope::All).unwrap().chunks;
        let of_prefix = stored.iter().filter(|info| info.prefix.is_some() && info.key != system);
        assert!(of_prefix.clone().count() > chunks && of_prefix.clone().all(|info| keys.contains(&info.key)));
    }
}

#[test]
fn a_missing_chunk_is_computed_as_it_was() {
    let engine = tiny_engine("llama", exact(Dtype::F16));
    let prompt = random_prompt(&engine, 7, &[50, 30], 9, 3);
    let averaging = averaged(&engine, &prompt);
    averaging.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
    let before = prefill(&averaging, &prompt, &Pie, prompt.len());
    for index in [0, 1] {
        averaging.store().remove(&averaging.chunk_id_in(&prompt, index).key()).unwrap();
    }
    let after = prefill(&averaging, &prompt, &Pie, prompt.len());
    assert_eq!(after.load.reused.prefilled, 2);
    assert_eq!(before.logits, after.logits);
}
