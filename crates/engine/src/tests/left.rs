//! Chunks that are prefilled behind what stands left of them in their document.

use refrain_fusion::{Drift, FullReuse, Pie, Vanilla};
use refrain_kernels::Dtype;
use refrain_store::{KvQuantization, Scope};

use super::*;

/// A prompt of documents that are cut into chunks, and the engine that prefills them behind the prompt's system part.
fn prompt_of(engine: &Engine, system: usize, documents: &[&[usize]]) -> (Engine, Prompt) {
    let mut prompt = random_prompt(engine, system, &documents.concat(), 9, 3);
    let engine = engine.behind(&prompt.system).unwrap();
    let mut cut = std::mem::take(&mut prompt.chunks).into_iter().map(|chunk| chunk.tokens);
    for (document, chunks) in documents.iter().enumerate() {
        let whole = engine.whole_document(cut.by_ref().take(chunks.len()).collect());
        prompt.chunks.extend(whole.into_iter().map(|chunk| PromptChunk { document, ..chunk }));
    }
    (engine, prompt)
}

fn with_left(left_tokens: usize, kv: Dtype) -> Settings {
    Settings { left_tokens, chunk_tokens: 64, ..exact(kv) }
}

fn kv_of(engine: &Engine, chunk: &PromptChunk) -> Vec<f32> {
    keys_and_values(engine, &engine.chunk_id(chunk))
}

#[test]
fn a_document_in_one_piece_is_vanilla_to_the_bit_where_it_stands_first() {
    for (model, kv) in [("llama", Dtype::F16), ("phi3", Dtype::F32), ("qwen2", Dtype::F16)] {
        for engine in
            [tiny_engine(model, with_left(usize::MAX, kv)), without_bos(model, with_left(usize::MAX, kv))]
        {
            let (engine, prompt) = prompt_of(&engine, 7, &[&[64, 64, 30]]);
            engine.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
            let vanilla = prefill(&engine, &prompt, &Vanilla, prompt.len());
            for method in [shared(Pie), shared(Drift::default())] {
                let reused = prefill(&engine, &prompt, &method, prompt.len());
                assert_eq!(reused.load.reused.prefilled, 0);
                assert_eq!(reused.logits, vanilla.logits, "{model} {method:?}");
            }
        }
    }
}

#[test]
fn documents_after_the_first_are_not_exact_and_keep_to_themselves() {
    let engine = tiny_engine("llama", with_left(usize::MAX, Dtype::F32));
    let (engine, prompt) = prompt_of(&engine, 7, &[&[64, 20], &[64, 64]]);
    let left: Vec<usize> = prompt.chunks.iter().map(|chunk| chunk.left.len()).collect();
    assert_eq!(left, [0, 64, 0, 64], "no document stands before another");
    let method = Drift { charge: 1.0, ..Drift::default() };
    let rows = prefill(&engine, &prompt, &method, prompt.len()).stats.final_rows;
    let start = (7 + 64 + 20) as u32;
    assert!(rows[0] >= start && rows.contains(&start), "all but the first document is computed: {rows:?}");
}

#[test]
fn what_a_chunk_is_prefilled_behind_does_not_depend_on_what_was_stored_before() {
    for left_tokens in [16, 100, usize::MAX] {
        for system in [7, 0] {
            let fresh = || {
                let engine = tiny_engine("llama", with_left(left_tokens, Dtype::F16));
                prompt_of(&engine, system, &[&[64, 64, 64, 10]])
            };
            let ((all, prompt), (one, _)) = (fresh(), fresh());
            all.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
            for chunk in prompt.chunks.iter().rev() {
                one.ingest_prompt(&Prompt { chunks: vec![chunk.clone()], ..prompt.clone() }, &[shared(Pie)])
                    .unwrap();
                assert_eq!(kv_of(&all, chunk), kv_of(&one, chunk), "{left_tokens} {system} {:?}", chunk.part);
                let before = [all.before_chunks(), chunk.left.clone()].concat();
                let ids = [before.as_slice(), &chunk.tokens].concat();
                let alone = all.isolated(&ids, before.len(), Dtype::F16);
                let alone: Vec<f32> = alone
                    .iter()
                    .flat_map(|(k, v)| [k, v].map(|rows| rows.as_slice().floats()).concat())
                    .collect();
                assert_eq!(kv_of(&all, chunk), alone, "{left_tokens} {system} {:?}", chunk.part);
            }
        }
    }
}

#[test]
fn chunks_with_and_without_what_stands_left_of_them_are_different_chunks() {
    let plain = tiny_engine("llama", with_left(0, Dtype::F16));
    let (plain, apart) = prompt_of(&plain, 7, &[&[64, 64]]);
    let (_, prompt) = prompt_of(&tiny_engine("llama", with_left(16, Dtype::F16)), 7, &[&[64, 64]]);
    assert_eq!(prompt.chunks[1].left, prompt.chunks[0].tokens[48..]);
    plain.ingest_prompt(&apart, &[shared(Pie)]).unwrap();
    plain.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
    let stored = plain.store().list(Scope::All).unwrap().chunks;
    assert_eq!(stored.iter().filter(|info| info.tokens == 64).count(), 3, "the first chunk is the same");
    assert_ne!(plain.chunk_id(&apart.chunks[1]), plain.chunk_id(&prompt.chunks[1]));
    // A quantised store keeps each chunk as if it alone were brought.
    let quantised = plain.store_dtype(KvQuantization::Q8);
    quantised.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
    let one = tiny_engine("llama", with_left(16, Dtype::F16)).store_dtype(KvQuantization::Q8);
    let one = one.behind(&prompt.system).unwrap();
    one.ingest_prompt(&Prompt { chunks: vec![prompt.chunks[1].clone()], ..prompt.clone() }, &[shared(Pie)])
        .unwrap();
    assert_eq!(kv_of(&quantised, &prompt.chunks[1]), kv_of(&one, &prompt.chunks[1]));
}

#[test]
fn as_much_stands_left_of_a_chunk_as_the_context_has_room_for() {
    let engine = tiny_engine("llama", with_left(usize::MAX, Dtype::F16));
    let context = engine.decoder().config().context;
    let (engine, prompt) = prompt_of(&engine, 7, &[&[64; 10]]);
    let most = prompt.chunks.iter().map(|chunk| chunk.left.len() + chunk.tokens.len()).max().unwrap();
    assert_eq!(most, context - 7);
    let last = &prompt.chunks[9..];
    engine.ingest_prompt(&Prompt { chunks: last.to_vec(), ..prompt.clone() }, &[shared(Pie)]).unwrap();
    assert_eq!(kv_of(&engine, &last[0]).len() % 64, 0);
}

/// Keys of a stored chunk keep the positions that they were prefilled at, which may lie behind the end of a prompt that holds little else.
#[test]
fn keys_may_keep_positions_behind_the_prompts_end() {
    let settings = with_left(usize::MAX, Dtype::F16);
    let store = Store::in_memory(1 << 24);
    let open =
        || Engine::open_on(&device(), &tiny("llama"), store.clone(), settings.clone(), |_, _| ()).unwrap();
    let (engine, prompt) = prompt_of(&open(), 7, &[&[64, 64, 64, 64]]);
    let last = Prompt { chunks: prompt.chunks[3..].to_vec(), ..prompt.clone() };
    // The engine that has computed the chunk has rotations for its positions.
    engine.ingest_prompt(&last, &[shared(FullReuse)]).unwrap();
    let computed = prefill(&engine, &last, &shared(FullReuse), last.len());
    let stored = prefill(&open().behind(&prompt.system).unwrap(), &last, &shared(FullReuse), last.len());
    assert_eq!(stored.load.reused.prefilled, 0);
    assert_eq!(stored.logits, computed.logits);
}

/// A rotation that depends on the length is that of all tokens up to the chunk's end, whichever of them were prefilled before.
#[test]
fn chunks_are_prefilled_with_one_rotation() {
    let engine = tiny_engine("phi3_longrope", with_left(usize::MAX, Dtype::F16));
    let (engine, prompt) = prompt_of(&engine, 7, &[&[64, 64, 64, 10]]);
    engine.ingest_prompt(&prompt, &[shared(Pie)]).unwrap();
    for chunk in &prompt.chunks {
        let before = [engine.before_chunks(), chunk.left.clone()].concat();
        let alone = engine.isolated(&[before.as_slice(), &chunk.tokens].concat(), before.len(), Dtype::F16);
        let rows = alone.iter().flat_map(|(k, v)| [k, v].map(|rows| rows.as_slice().floats()).concat());
        assert_eq!(kv_of(&engine, chunk), rows.collect::<Vec<f32>>(), "{:?}", chunk.part);
    }
}
