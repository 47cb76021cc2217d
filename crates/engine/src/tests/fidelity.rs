//! Answers held against vanilla's.

use refrain_eviction::POLICIES;
use refrain_fusion::{InfoFlow, METHODS, Pie, Vanilla};
use refrain_model::LayerSpec;

use super::*;
use crate::sequence::Generator;
use crate::{Answer, Fidelity, GenerateRequest, Oracle, Parts, Reference, Sampling};

/// Methods and policies that go through each kind of cache: whole, of chosen spans, retrieving, bounded.
const WAYS: [(&str, &str); 9] = [
    ("vanilla", "full"),
    ("pie", "full"),
    ("a3:ratio=0.3", "full"),
    ("sam_kv:block=16", "full"),
    ("inf_llm:local=32,initial=8,block=8", "full"),
    ("vanilla", "morph_kv:capacity=60,window=8"),
    ("a3", "h2o:capacity=60"),
    ("pie", "streaming_llm:capacity=60"),
    ("pie", "a3_ex:capacity=100"),
];

fn sampling(max_tokens: usize) -> Sampling {
    Sampling { max_tokens, ..Sampling::default() }
}

/// One answer beside the reference.
fn beside(
    engine: &Engine,
    prompt: &Prompt,
    request: &GenerateRequest,
    reference: &Reference,
) -> (Answer, Fidelity) {
    let mut answers = Engine::answers_beside(prompt, &[(engine, request.clone())], reference).unwrap();
    answers.remove(0).unwrap()
}

#[test]
fn an_answer_beside_another_is_the_one_alone() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let mut left = 0;
    for seed in 1..5 {
        let prompt = random_prompt(&engine, 3, &[70, 90, 40], 9, seed);
        let sampling = sampling(24);
        for (forced, maps) in [(5, true), (60, false)] {
            let reference = engine.reference(&prompt, &sampling, forced, maps).unwrap();
            let request = |(method, policy)| GenerateRequest {
                eviction: POLICIES.parse(policy).unwrap(),
                ..GenerateRequest::new(METHODS.parse(method).unwrap(), sampling.clone())
            };
            let requests: Vec<_> = WAYS.map(|way| (&engine, request(way))).into();
            let together = Engine::answers_beside(&prompt, &requests, &reference).unwrap();
            for ((_, request), together) in requests.iter().zip(together) {
                let alone = engine.answer(&prompt, request, |_| true).unwrap();
                let (beside, close) = beside(&engine, &prompt, request, &reference);
                assert_eq!(beside.tokens, alone.tokens, "{request:?}");
                assert_eq!((&beside.text, beside.finish), (&alone.text, alone.finish));
                assert_eq!(beside.stats.answer_tokens, alone.tokens.len());
                assert_eq!(beside.stats.retained_tokens, alone.stats.retained_tokens);
                assert_eq!(close.agreement.positions, forced.min(reference.answer.tokens.len()));
                let (other, as_close) = together.unwrap();
                assert_eq!((&other.tokens, other.stats.tpot), (&alone.tokens, None));
                assert_eq!(as_close, close, "{request:?}");
                left += usize::from(beside.tokens != reference.answer.tokens);
            }
        }
    }
    assert!(left > 10, "most answers must leave vanilla's for this to say anything: {left}");
}

#[test]
fn sampled_answers_are_the_ones_alone_too() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 3, &[70, 90], 9, 3);
    let drawn = Sampling { temperature: 1.0, seed: 4, ..sampling(12) };
    let reference = engine.reference(&prompt, &drawn, 6, false).unwrap();
    let request = GenerateRequest::new(shared(Vanilla), drawn.clone());
    let (beside, _) = beside(&engine, &prompt, &request, &reference);
    assert_eq!(beside.tokens, engine.answer(&prompt, &request, |_| true).unwrap().tokens);
    assert_ne!(beside.tokens, reference.answer.tokens, "the reference is greedy");
}

#[test]
fn vanilla_is_as_near_as_can_be_and_others_are_farther() {
    everywhere(|engine| {
        let prompt = random_prompt(engine, 2, &[64, 80], 10, 11);
        let sampling = sampling(8);
        let reference = engine.reference(&prompt, &sampling, 8, true).unwrap();
        let close = |method: &str| {
            let method = METHODS.parse(method).unwrap();
            beside(engine, &prompt, &GenerateRequest::new(method.clone(), sampling.clone()), &reference).1
        };
        let own = close("vanilla");
        assert_eq!((own.agreement.kl, own.agreement.top1), (0.0, 1.0));
        assert_eq!(own.attention_l2, vec![0.0; engine.decoder().config().num_layers()]);
        assert_eq!(own.hits.map(|hits| (hits.best, hits.as_many)), Some((1.0, 1.0)));
        let all = close("a3:ratio=1");
        assert!(all.agreement.kl < 1e-6 && all.attention_l2.iter().all(|l2| *l2 < 1e-4), "{all:?}");
        let reused = close("full_reuse");
        assert!(reused.agreement.kl > 0.0 && reused.hits.is_none());
        // Layer 0 sees the same keys, at other positions; a short window sees little but the question.
        let layers = || reused.attention_l2.iter().zip(&engine.decoder().config().layers);
        let moved = |(l2, layer): (&f64, &LayerSpec)| layer.window.is_some() || *l2 > 1e-6;
        assert!(layers().all(moved) && layers().all(|(l2, _)| *l2 < 1.5), "{:?}", reused.attention_l2);
        let pie = close("pie");
        assert!(
            pie.attention_l2[0] < 1e-5 && pie.attention_l2.last() > Some(&1e-6),
            "{:?}",
            pie.attention_l2
        );
        let some = close("a3:ratio=0.3").hits.unwrap();
        assert!(some.best > 0.0 && some.best < 1.0 && some.as_many <= 1.0, "{some:?}");
        let sparse = close("sam_kv:block=8");
        assert_eq!(sparse.attention_l2.len(), engine.decoder().config().num_layers());
        assert!(close("inf_llm:local=16,initial=4,block=4").attention_l2.is_empty());
    });
}

/// Oracle 16: of the tokens that vanilla's question attends to most, A³ recomputes more than what does not look at the question.
#[test]
fn oracle_16_a3_recomputes_what_the_question_attends_to() {
    let Some(path) = real(SMOLLM2) else { return };
    let engine = engine(&path, Settings { chunk_tokens: 64, ..small() });
    let text = |file: &str| {
        let path = format!("{}/../../examples/docs/{file}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    };
    let asked = [
        ("drive/chain.md", "drive/brakes.md", "How far does a waxed chain run between treatments?"),
        ("drive/chain.md", "drive/gears.md", "When is a chain worn?"),
        ("drive/brakes.md", "drive/gears.md", "Which fluid do Shimano, Magura and Tektro brakes use?"),
        ("drive/brakes.md", "wheels/tyres.md", "How thick must a brake pad be?"),
        ("wheels/bearings.md", "wheels/tyres.md", "How many balls does a rear hub hold on each side?"),
        ("wheels/wheels.md", "wheels/bearings.md", "How is a wheel trued?"),
        ("care/torque.md", "care/lights.md", "How tight is a stem bolt?"),
        ("care/fit.md", "care/calendar.md", "How high is the saddle?"),
    ];
    let ways = ["a3", "lego_link:charge=0.2", "cache_blend"].map(|method| METHODS.parse(method).unwrap());
    let mut hits = [0.0; 3];
    for (one, other, question) in asked {
        let documents = [one, other].map(|file| text(file).chars().take(600).collect::<String>());
        let question = format!("\n\n{question}");
        let parts = Parts {
            before: "Answer from the notes.\n\n",
            documents: &documents,
            question: &question,
            ..Parts::default()
        };
        let prompt = engine.compose(&parts).unwrap();
        let reference = engine.reference(&prompt, &sampling(1), 1, true).unwrap();
        let requests = ways.clone().map(|method| (&engine, GenerateRequest::new(method, sampling(1))));
        let answers = Engine::answers_beside(&prompt, &requests, &reference).unwrap();
        for (sum, answer) in hits.iter_mut().zip(answers) {
            *sum += answer.unwrap().1.hits.unwrap().best / asked.len() as f64;
        }
    }
    let [a3, lego_link, cache_blend] = hits;
    assert!(a3 > lego_link && a3 > cache_blend, "{hits:?}");
}

#[test]
fn an_answer_has_its_least_tokens() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let begins = |seed| {
        let prompt = random_prompt(&engine, 2, &[30], 5, seed);
        let first =
            engine.answer(&prompt, &GenerateRequest::new(shared(Vanilla), sampling(1)), |_| true).unwrap();
        (prompt, first)
    };
    let (prompt, first) = (1..).map(begins).find(|(_, first)| !first.text.is_empty()).unwrap();
    let stop = vec![first.text.clone()];
    let answer = |engine: &Engine, min_tokens| {
        let sampling = Sampling { min_tokens, stop: stop.clone(), ..sampling(4) };
        engine.answer(&prompt, &GenerateRequest::new(shared(Vanilla), sampling), |_| true).unwrap()
    };
    assert_eq!((answer(&engine, 0).text.as_str(), answer(&engine, 0).tokens.len()), ("", 1));
    assert!(answer(&engine, 1).tokens.len() > 1 && answer(&engine, 1).text.starts_with(&first.text));
    // An end token is not chosen either.
    let sampling = Sampling { min_tokens: 1, ..sampling(4) };
    let mut generator = Generator::new(&engine, &GenerateRequest::new(shared(Vanilla), sampling), &prompt, 0);
    let mut logits = vec![0.0; engine.decoder().config().vocab];
    let end = *engine.tokenizer().eos_ids().first().unwrap();
    (logits[end as usize], logits[7]) = (2.0, 1.0);
    assert_eq!((generator.choose(&mut logits.clone(), 0), generator.choose(&mut logits, 1)), (7, end));
}

#[test]
fn parts_are_taken_as_they_are() {
    let engine = engine(&tiny("llama"), Settings { chunk_tokens: 8, ..Settings::default() });
    let documents = ["  one two three four five six seven eight nine ten\n".to_owned(), "b\n\n".to_owned()];
    let parts = Parts {
        before: "Read:\n",
        documents: &documents,
        question: "\nWhy?",
        answer_prefix: " So",
        ..Parts::default()
    };
    let prompt = engine.compose(&parts).unwrap();
    let text = engine.tokenizer().decode(&prompt.ids(), true);
    assert_eq!(
        text.trim_start(),
        "Read:\n  one two three four five six seven eight nine ten\nb\n\n\nWhy? So"
    );
    assert_eq!(prompt.chunks.last().unwrap().document, 1);
    assert!(prompt.chunks.len() > 2 && prompt.chunks.iter().all(|chunk| chunk.tokens.len() <= 8));
    let apart = engine.compose(&Parts { apart: true, ..parts }).unwrap();
    assert_eq!(apart.chunks[0].tokens.len(), 8);
    let documents: Vec<usize> = apart.chunks.iter().map(|chunk| chunk.document).collect();
    assert_eq!(documents, (0..apart.chunks.len()).collect::<Vec<_>>());
    assert!(engine.compose(&Parts { question: "", answer_prefix: "", ..parts }).is_err());
    let (pie, sam_kv) = (METHODS.parse("pie").unwrap(), METHODS.parse("sam_kv").unwrap());
    engine.ingest_prompt(&prompt, std::slice::from_ref(&sam_kv)).unwrap();
    let whole = engine.chunk_id(&prompt.contexts(500).chunks[0]);
    assert!(engine.store().contains(&whole) && !engine.store().contains(&engine.chunk_id(&prompt.chunks[0])));
    engine.ingest_prompt(&apart, &[sam_kv.clone(), pie.clone()]).unwrap();
    let id = engine.chunk_id(&apart.chunks[0]);
    assert!(
        engine.store().contains(&id)
            && engine.store().has_aux_tensors_in_memory(&id, &sam_kv.statistics()[0].kind())
    );
}

#[test]
fn a_method_that_reorders_chunks_answers_the_reordered_prompt() {
    everywhere(|engine| {
        let mut moved = 0;
        for seed in 1..4 {
            let prompt = random_prompt(engine, 5, &[60, 30, 90, 45], 8, seed);
            let [ordered, plain] =
                [true, false].map(|reorder| InfoFlow { ratio: 0.3, reorder, ..InfoFlow::default() });
            let got = prefill(engine, &prompt, &ordered, prompt.len());
            let order = got.stats.order.clone().unwrap();
            moved += usize::from(order != [0, 1, 2, 3]);
            let other = prompt.in_order(&order);
            let same = prefill(engine, &other, &plain, prompt.len());
            assert_eq!((got.logits, &got.stats.final_rows), (same.logits, &same.stats.final_rows));
            assert_eq!(got.stats.probe_rows, 2 * same.stats.probe_rows, "both probes are counted");
            // The chunks with most chosen tokens stand last.
            let first = prefill(engine, &prompt, &plain, prompt.len());
            let share = |(chunk, span): (&PromptChunk, refrain_kv::Span)| {
                let within = first.stats.final_rows.iter().filter(|row| span.contains(**row)).count();
                (chunk.title.clone(), within as f64 / span.len() as f64)
            };
            let shares: std::collections::HashMap<_, _> =
                prompt.chunks.iter().zip(prompt.chunk_spans()).map(share).collect();
            let shares: Vec<f64> = other.chunks.iter().map(|chunk| shares[&chunk.title]).collect();
            assert!(shares.is_sorted(), "{shares:?}");
            // With every token recomputed it is vanilla over the prompt in that order.
            let all = shared(InfoFlow { ratio: 1.0, ..ordered });
            let order = engine.chunk_order(&prompt, &all).unwrap().unwrap();
            let reference = engine.reference(&prompt.in_order(&order), &sampling(6), 6, false).unwrap();
            let (answer, close) =
                beside(engine, &prompt, &GenerateRequest::new(all.clone(), sampling(6)), &reference);
            assert_eq!((answer.stats.chunk_order, answer.tokens), (order, reference.answer.tokens.clone()));
            assert!(close.agreement.kl < 1e-6, "{close:?}");
            let compared = engine.compare(&prompt, &[("all".to_owned(), all.clone())], Eviction::full(), 6);
            assert!(compared.unwrap()[0].kl < 1e-6, "a comparison is with vanilla in that order");
            let named = shared(plain);
            assert_eq!(engine.chunk_order(&prompt, &named).unwrap(), None);
            // A prompt of a model of size takes seconds: one whose chunks move is enough.
            if moved > 0 && engine.decoder().config().num_layers() > 10 {
                break;
            }
        }
        assert!(moved > 0, "no chunk was moved");
    });
}

#[test]
fn over_true_keys_and_values_reuse_is_vanilla_and_over_some_it_is_between() {
    everywhere(|engine| {
        let prompt = random_prompt(engine, 5, &[60, 90, 45], 8, 2);
        engine.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
        let pie = shared(Pie);
        let vanilla = prefill(engine, &prompt, &Vanilla, prompt.len()).logits;
        let off = |engine: &Engine, method: &Arc<dyn FusionMethod>| {
            max_difference(&prefill(engine, &prompt, method, prompt.len()).logits, &vanilla)
        };
        let reused = off(engine, &pie);
        let keys = engine.oracle(&prompt, &pie, Oracle::Keys).unwrap().0;
        let values = engine.oracle(&prompt, &pie, Oracle::Values).unwrap().0;
        assert_ne!((off(&keys, &pie), off(&values, &pie)), (reused, reused));
        let both = keys.oracle(&prompt, &pie, Oracle::Values).unwrap().0;
        assert!(off(&both, &pie) < 1e-4 && reused > 1e-2, "{} {reused}", off(&both, &pie));
        // A method that recomputes everything has chosen every token, and what answers over them recomputes nothing.
        let (all, method) = engine
            .oracle(&prompt, &shared(InfoFlow { ratio: 1.0, ..InfoFlow::default() }), Oracle::Chosen)
            .unwrap();
        assert_eq!(format!("{method:?}"), "Pie");
        assert!(off(&all, &method) < 1e-4);
        let (some, method) = engine.oracle(&prompt, &shared(InfoFlow::default()), Oracle::Chosen).unwrap();
        assert!(off(&some, &method) > 1e-3);
        assert_eq!(off(engine, &pie), reused, "the engine's own chunks stay as they were");
    });
    for name in ["keys", "values", "chosen"] {
        assert_eq!(name.parse::<Oracle>().unwrap().to_string(), name);
    }
    assert!("rows".parse::<Oracle>().unwrap_err().contains("keys, values or chosen"));
}
