//! An answer from documents: `cargo run --release -p refrain-engine --example answer -- MODEL.gguf FOLDER QUESTION`.

use refrain_engine::{Engine, GenerateRequest, Sampling, Settings};
use refrain_store::Store;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, folder, question] = words.as_slice() else { return Err("give MODEL FOLDER QUESTION".into()) };
    let store = Store::open("chunks", 1 << 30)?;
    let engine = Engine::open(model.as_ref(), store, Settings::default(), |_, _| ())?;
    let read = refrain_documents::read_path(folder.as_ref());
    read.failures.iter().for_each(|failure| eprintln!("{failure}"));
    let documents = read.documents;
    engine.ingest(&documents, |_| ())?;
    let prompt = engine.prompt(&documents, question, &Default::default())?;
    let a3 = refrain_fusion::METHODS.parse("a3:ratio=0.15")?;
    let morph_kv = refrain_eviction::POLICIES.parse("morph_kv:capacity=600")?;
    let request = GenerateRequest { eviction: morph_kv, ..GenerateRequest::new(a3, Sampling::default()) };
    let answer = engine.answer(&prompt, &request, |_| true)?;
    println!("{}", answer.text);
    Ok(())
}
