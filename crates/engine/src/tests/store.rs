//! The store under the engine: fewer bits at rest, namespaces, and nothing of one request in another.

use std::path::Path;
use std::sync::Arc;

use refrain_fusion::{A3, FusionMethod, Pie, Vanilla};
use refrain_kernels::{Cpu, Device, Dtype, Isa};
use refrain_store::{ChunkId, KvQuantization, Scope, Store};

use super::{exact, prefill, random_prompt, shared, tiny};
use crate::{Engine, Prompt, PromptChunk, Settings};

fn open(folder: &Path, settings: Settings) -> Engine {
    Engine::open(&tiny("llama"), Store::open(folder, 1 << 24).unwrap(), settings, |_, _| ()).unwrap()
}

fn logits(
    engine: &Engine,
    prompt: &Prompt,
    method: &(impl FusionMethod + Clone + 'static),
) -> (Vec<f32>, usize) {
    let prefilled = prefill(engine, prompt, method, prompt.len());
    (prefilled.logits, prefilled.load.reused.prefilled)
}

/// Gateways cost loading by the bytes of a token at rest.
#[test]
fn a_token_takes_fewer_bytes_in_fewer_bits() {
    let bytes = |store_dtype| {
        let engine = open(tempfile::tempdir().unwrap().path(), Settings { store_dtype, ..exact(Dtype::F16) });
        (engine.stored_token_bytes(), engine.decoder().shape().token_bytes(Dtype::F16))
    };
    let [(plain, in_cache), (q8, _), (q4, _)] = KvQuantization::ALL.map(bytes);
    assert_eq!(plain, in_cache);
    assert!(4 * q8 < 3 * plain && q4 < plain, "{plain} {q8} {q4}");
}

/// Just computed, from memory, from disk, and computed again since a file was broken: the same bits, in fewer of them too.
#[test]
fn encoded_chunks_are_the_same_in_every_tier() {
    let mut seen = Vec::new();
    for store_dtype in KvQuantization::ALL {
        let settings = || Settings { store_dtype, ..exact(Dtype::F16) };
        for entry in refrain_fusion::METHODS.entries {
            let method = entry.with([]).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let engine = open(folder.path(), settings());
            let prompt = random_prompt(&engine, 5, &[100, 73], 9, 11);
            let (fresh, computed) = logits(&engine, &prompt, &method);
            assert_eq!(computed > 0, method.reuses());
            assert_eq!(logits(&engine, &prompt, &method), (fresh.clone(), 0), "{} memory", entry.name);
            let again = open(folder.path(), settings());
            assert_eq!(logits(&again, &prompt, &method), (fresh.clone(), 0), "{} disk", entry.name);
            for info in again.store().list(Scope::All).unwrap().chunks {
                let path = info.path.unwrap();
                let mut bytes = std::fs::read(&path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(&path, bytes).unwrap();
            }
            let broken = open(folder.path(), settings());
            assert_eq!(logits(&broken, &prompt, &method).0, fresh, "{} broken", entry.name);
            if entry.name == "pie" {
                seen.push(fresh);
            }
        }
    }
    assert!(seen[0] != seen[1] && seen[1] != seen[2], "they are not encoded at all");
}

#[test]
fn what_is_encoded_is_near_what_is_exact() {
    let engine = |store_dtype| {
        let settings = Settings { store_dtype, ..exact(Dtype::F32) };
        Engine::open(&tiny("llama"), Store::in_memory(1 << 24), settings, |_, _| ()).unwrap()
    };
    let exact = engine(KvQuantization::Exact);
    let prompt = random_prompt(&exact, 5, &[120, 90], 9, 3);
    let expected = logits(&exact, &prompt, &Pie).0;
    let scale = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let error = |store_dtype| {
        let found = logits(&engine(store_dtype), &prompt, &Pie).0;
        found.iter().zip(&expected).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs())) / scale
    };
    let (q8, q4) = (error(KvQuantization::Q8), error(KvQuantization::Q4));
    assert!(q8 > 0.0 && q8 < 0.01, "{q8}");
    assert!(q4 > q8 && q4 < 0.15, "{q4}");
}

#[test]
fn chunks_of_one_namespace_are_invisible_to_another_unless_they_are_shared() {
    let folder = tempfile::tempdir().unwrap();
    let engine = |namespace: &str, shared: Option<&str>| {
        let shared = shared.map(str::to_owned);
        open(folder.path(), Settings { namespace: namespace.to_owned(), shared, ..exact(Dtype::F16) })
    };
    let prompt = random_prompt(&engine("", None), 5, &[40, 33], 9, 11);
    let (expected, computed) = logits(&engine("one", None), &prompt, &A3::default());
    assert_eq!(computed, 3);
    assert_eq!(logits(&engine("one", None), &prompt, &A3::default()).1, 0);
    assert_eq!(logits(&engine("two", None), &prompt, &A3::default()), (expected.clone(), 3));
    // Chunks that all share are used, and nothing of a request is stored there.
    logits(&engine("shared", None), &prompt, &A3::default());
    let three = engine("three", Some("shared"));
    let listed = |namespace: &str| three.store().list(Scope::Namespace(namespace)).unwrap().chunks.len();
    let before = listed("shared");
    let (found, computed) = logits(&three, &prompt, &A3::default());
    assert!(found == expected);
    assert_eq!(computed, 0);
    assert_eq!((listed("shared"), listed("three"), listed("one"), listed("two")), (before, 0, 3, 3));
}

/// No part of a request changes a key or value that another request reads.
#[test]
fn a_request_changes_nothing_that_another_reads() {
    let settings = || exact(Dtype::F16);
    let alone = open(tempfile::tempdir().unwrap().path(), settings());
    let prompt = random_prompt(&alone, 5, &[60, 45], 9, 7);
    let methods = [shared(Vanilla), shared(Pie), shared(A3::default())];
    let expected: Vec<_> = methods.iter().map(|method| logits(&alone, &prompt, method).0).collect();
    let chunk_text = prompt.chunks[1].tokens.clone();
    let other = random_prompt(&alone, 7, &[50], 12, 99);
    let requests = [
        // The same documents in another order and among others, with another question.
        Prompt {
            chunks: vec![prompt.chunks[1].clone(), other.chunks[0].clone(), prompt.chunks[0].clone()],
            ..other.clone()
        },
        // A document's text in the question, and in the system part.
        Prompt { question: [other.question.clone(), chunk_text.clone()].concat(), ..other.clone() },
        Prompt { system: [other.system.clone(), chunk_text.clone()].concat(), ..prompt.clone() },
        // A document that begins, or ends, as another does.
        Prompt {
            chunks: vec![PromptChunk::whole(0, "longer", [chunk_text.clone(), vec![5, 6, 7]].concat())],
            ..prompt.clone()
        },
    ];
    for (number, request) in requests.iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let engine = open(folder.path(), settings());
        for method in &methods {
            logits(&engine, request, method);
        }
        for (method, expected) in methods.iter().zip(&expected) {
            assert_eq!(&logits(&engine, &prompt, method).0, expected, "after request {number}");
        }
        for chunk in &prompt.chunks {
            let id: ChunkId = engine.chunk_id(chunk);
            let (here, there) = (engine.store().get(&id).unwrap(), alone.store().get(&id).unwrap());
            let (here, there) = (here.unwrap(), there.unwrap());
            for layer in 0..here.layers() {
                let (here, there) = (here.layer(layer), there.layer(layer));
                assert_eq!(here.k().as_bytes(), there.k().as_bytes(), "request {number}, layer {layer}");
                assert_eq!(here.v().as_bytes(), there.v().as_bytes(), "request {number}, layer {layer}");
            }
        }
    }
}

/// Two machines of different kernels share a folder of chunks. An answer depends on the machine's own kernels alone where chunks are named by
/// their numerics, and else on which machine was first.
#[test]
fn machines_of_other_numerics_share_chunks_unless_they_are_strict() {
    let Some(best) = [Isa::Avx512, Isa::Avx2].into_iter().find(|isa| isa.available()) else {
        eprintln!("skipped: this machine has one set of kernels");
        return;
    };
    let machine = |isa, folder: &Path, strict_numerics| {
        let device: Arc<dyn Device> = Arc::new(Cpu::with_isa(2, isa).unwrap());
        // The order of sums shows in `f32`; rounded, keys and values of so small a model are often the same.
        let settings = Settings { strict_numerics, ..exact(Dtype::F32) };
        let store = Store::open(folder, 1 << 24).unwrap();
        Engine::open_on(&device, &tiny("llama"), store, settings, |_, _| ()).unwrap()
    };
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let alone = machine(best, folders[0].path(), false);
    let prompt = random_prompt(&alone, 5, &[100, 73], 9, 11);
    let (expected, computed) = logits(&alone, &prompt, &Pie);
    for (folder, strict) in folders[1..].iter().zip([false, true]) {
        let first = machine(Isa::Portable, folder.path(), strict);
        assert_eq!(first.numerics(), "f32-portable");
        assert_eq!(logits(&first, &prompt, &Pie).1, computed);
        let told = first.store().list(Scope::All).unwrap().chunks;
        assert!(told.iter().all(|info| info.numerics.as_deref() == Some("f32-portable")), "{told:?}");
        let second = machine(best, folder.path(), strict);
        assert_eq!(second.numerics(), format!("f32-{best}"));
        let (found, prefilled) = logits(&second, &prompt, &Pie);
        assert_eq!(prefilled, if strict { computed } else { 0 });
        assert_eq!(found == expected, strict);
        // What is there is found again, by each its own.
        for isa in [Isa::Portable, best] {
            assert_eq!(logits(&machine(isa, folder.path(), strict), &prompt, &Pie).1, 0);
        }
    }
}
