//! The library, as a program uses it: a model of the repository, a store of its own.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use refrain::engine::Advance;
use refrain::fusion::METHODS;
use refrain::store::Store;
use refrain::{Document, Engine, EngineOptions, Error, FinishReason, Library, Prefix, Question};
use tempfile::TempDir;

const MODEL: &str = "../../tests/golden/tiny/llama";

/// An engine on a store that is empty, and far from what was found for models of this machine.
fn engine(folder: &TempDir) -> EngineOptions<'static> {
    EngineOptions::new(MODEL).store(folder.path().join("chunks")).data_folder(Some(folder.path().to_owned()))
}

fn documents() -> Vec<Document> {
    let text = |index: usize| format!("Bearing {index} runs {} km before it is greased again. ", 100 * index);
    (1..4).map(|index| Document { title: format!("Bearing {index}"), text: text(index) }).collect()
}

fn question() -> Question {
    Question::new("How far does bearing 2 run?").documents(documents()).max_tokens(12)
}

fn opened(options: EngineOptions<'_>) -> Engine {
    options.open().unwrap()
}

#[test]
fn a_stream_is_the_whole_answer_token_by_token() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder));
    for (method, evict) in
        [("vanilla", None), ("a3:ratio=0.4", None), ("pie", Some("streaming_llm:capacity=64"))]
    {
        let mut question = question().method(method);
        question.evict = evict.map(str::to_owned);
        let whole = question.ask(&engine).unwrap();
        let mut stream = question.stream(&engine).unwrap();
        assert!(stream.answer().is_none(), "nothing is computed before it is asked for");
        let tokens: Vec<_> = stream.by_ref().map(Result::unwrap).collect();
        let ids: Vec<u32> = tokens.iter().filter_map(|token| token.id).collect();
        let text: String = tokens.iter().map(|token| token.text.as_str()).collect();
        assert_eq!(text, whole.text, "{method}");
        // The stream tells of tokens whose text is the answer's, the answer also of the one that ended it.
        let end = whole.tokens.len() - usize::from(whole.finish == FinishReason::Stop);
        assert_eq!(ids, whole.tokens[..end], "{method}");
        assert!(stream.next().is_none());
        let streamed = stream.answer().unwrap();
        assert_eq!(
            (&streamed.tokens, &streamed.text, streamed.finish),
            (&whole.tokens, &whole.text, whole.finish)
        );
    }
}

/// All times of an answer are within the calls that computed it, chunks that were prefilled for it included.
#[test]
fn the_time_between_two_calls_of_a_stream_is_the_callers() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder));
    let mut computing = Duration::ZERO;
    let mut timed = |work: &mut dyn FnMut() -> bool| {
        let began = Instant::now();
        let goes_on = work();
        computing += began.elapsed();
        std::thread::sleep(Duration::from_millis(5));
        goes_on
    };
    let mut stream = None;
    timed(&mut || {
        stream = Some(question().method("pie").stream(&engine).unwrap());
        true
    });
    let mut stream = stream.unwrap();
    while timed(&mut || stream.next().transpose().unwrap().is_some()) {}
    let answer = stream.answer().unwrap();
    let decoding = answer.stats.tpot.unwrap() * (answer.tokens.len() - 1) as f64;
    let (counted, computing) = (answer.stats.ttft + decoding, computing.as_secs_f64());
    assert!(answer.tokens.len() > 2 && counted <= computing, "{counted} of {computing} s");
}

#[test]
fn questions_travel_and_share_an_engine() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder));
    let expected = question().ask(&engine).unwrap();
    let asked: Vec<_> = (0..3)
        .map(|_| {
            let (question, engine) = (question(), engine.clone());
            std::thread::spawn(move || question.ask(&engine).unwrap())
        })
        .collect();
    for answer in asked {
        assert_eq!(answer.join().unwrap().tokens, expected.tokens);
    }
}

#[test]
fn documents_that_were_ingested_are_reused_and_others_are_ingested_by_the_question() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder).prefix(Prefix::None));
    let report = engine.ingest(&documents()[..2], |_| ()).unwrap();
    assert_eq!(report.documents, 2);
    let stored = |engine: &Engine| engine.store().stats().stored;
    let before = stored(&engine);
    let answer = question().method("pie").ask(&engine).unwrap();
    assert_eq!(answer.stats.recomputed_tokens, 0);
    assert!(answer.stats.cached_tokens >= answer.stats.document_tokens, "all documents and the system part");
    assert!(stored(&engine) > before, "the third document was prefilled and kept");
    assert_eq!(answer.stats.prefilled_chunks, 2, "the third document and the system part");
    assert!(answer.stats.prefilled_tokens > 0 && answer.stats.found_tokens() > 0);
    let mut again = question().method("pie").stream(&engine).unwrap();
    assert!(again.by_ref().all(|token| token.is_ok()));
    let stats = &again.answer().unwrap().stats;
    assert_eq!((stats.prefilled_chunks, stats.prefilled_tokens), (0, 0));
    assert_eq!(question().method("vanilla").ask(&engine).unwrap().stats.cached_tokens, 0);
}

#[test]
fn a_question_without_a_method_is_answered_by_the_engines() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("chunks"), 1 << 28).unwrap();
    let given = engine(&folder).method("pie").prefix(Prefix::None).open_on(store.clone()).unwrap();
    let stats = question().ask(&given).unwrap().stats;
    assert!(stats.recomputed_tokens == 0 && stats.cached_tokens >= stats.document_tokens);
    // A model that nobody has tuned gets a method near vanilla, behind averaged chunks.
    let auto = engine(&folder).open_on(store).unwrap();
    assert_eq!(
        format!("{:?}", auto.default_method()),
        format!("{:?}", METHODS.parse("drift:charge=0.3").unwrap())
    );
    let kept =
        PathBuf::from(folder.path()).join("tuned").join(format!("{}.toml", refrain::fingerprint(&auto)));
    let mut warnings = Vec::new();
    std::fs::create_dir_all(kept.parent().unwrap()).unwrap();
    std::fs::write(&kept, "broken").unwrap();
    drop(auto);
    engine(&folder).on_warning(|text| warnings.push(text.to_owned())).open().unwrap();
    assert!(warnings.len() == 1 && warnings[0].contains("is not used"), "{warnings:?}");
}

#[test]
fn methods_are_compared_over_vanillas_answer() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder));
    let rows = question().compare(&engine, &["vanilla", "pie", "a3:ratio=1"], 6).unwrap();
    assert_eq!(
        rows.iter().map(|row| row.method.as_str()).collect::<Vec<_>>(),
        ["vanilla", "pie", "a3:ratio=1"]
    );
    assert_eq!((rows[0].kl, rows[0].top1), (0.0, 1.0));
    assert!(rows[1].kl > rows[2].kl, "recomputing everything comes nearer than recomputing nothing");
}

#[test]
fn streams_go_step_by_step_and_comparisons_can_be_ended() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder).prefix(Prefix::None));
    let mut stream = question().method("pie").stream(&engine).unwrap();
    assert_eq!(engine.store().stats().stored, 0, "nothing is ingested before it is asked for");
    let mut steps = 0;
    while stream.advance().unwrap() != Advance::Done {
        steps += 1;
    }
    let layers = engine.decoder().config().num_layers();
    assert!(steps > 5 * layers, "each layer of system part, documents and prompt is a step: {steps}");
    assert_eq!(engine.store().stats().stored, 4);
    let ids: Vec<u32> = stream.by_ref().filter_map(|token| token.unwrap().id).collect();
    let whole = question().method("pie").ask(&engine).unwrap();
    assert_eq!(
        (ids.as_slice(), &stream.answer().unwrap().tokens),
        (&whole.tokens[..ids.len()], &whole.tokens)
    );
    let compare = |most: usize| {
        let mut asked = 0;
        let goes_on = || {
            asked += 1;
            asked <= most
        };
        let rows = question().compare_while(&engine, &["pie", "vanilla"], 2, goes_on).unwrap();
        (rows.len(), asked)
    };
    let (all, asked) = compare(usize::MAX);
    assert_eq!((all, compare(asked - 1).0, compare(0).0), (2, 1, 0));
}

#[test]
fn a_bias_of_a_token_that_the_model_lacks_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder));
    let mut question = question();
    question.sampling.logit_bias.insert(u32::MAX, 1.0);
    let error = question.ask(&engine).unwrap_err().to_string();
    assert!(error.contains("none of id 4294967295"), "{error}");
}

#[test]
fn errors_say_what_is_wrong_and_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let open = |model: &str| {
        EngineOptions::new(model)
            .models(folder.path())
            .store(folder.path().join("chunks"))
            .open()
            .unwrap_err()
    };
    let error = open("no-such-model");
    assert!(
        matches!(error, Error::UnknownModel { .. }) && error.hint().unwrap().contains("smollm2-135m"),
        "{error}"
    );
    let error = open("smollm2-135m");
    assert_eq!(error.hint().as_deref(), Some("run: refrain pull smollm2-135m"), "{error}");
    assert!(matches!(open("hf:nobody"), Error::Address { .. }));
    let engine = opened(engine(&folder));
    let error = question().method("a4").ask(&engine).unwrap_err();
    assert!(error.to_string().contains("a3"), "a name that is near is told: {error}");
    for wrong in [question().evict("h2o:capacity=-1"), question().method("a3:ratio=2"), Question::new("")] {
        assert!(matches!(wrong.ask(&engine), Err(Error::Method(_) | Error::Engine(_))));
    }
    // An error of the prompt ends the stream.
    let long = Question::new("why ".repeat(5_000));
    assert!(
        long.stream(&engine).is_err(),
        "a prompt beyond the context is refused before anything is computed"
    );
    let broken = engine.with_prefix(&Prefix::Text("/no/such/file".into()), || Ok(Vec::new())).unwrap_err();
    assert!(broken.to_string().contains("/no/such/file"), "{broken}");
}

#[test]
fn what_a_library_finds_stands_in_the_prompt_as_it_was_prefilled() {
    let folder = tempfile::tempdir().unwrap();
    let engine = opened(engine(&folder));
    let kept = Library::open(&engine, folder.path()).unwrap();
    assert!(kept.is_empty().unwrap());
    kept.put(&documents()).unwrap();
    engine.ingest(&documents(), |_| ()).unwrap();
    let found = kept.search("Bearing 2 runs 200 km", 2, false).unwrap();
    assert_eq!(found.sources[0].title, "Bearing 2");
    let question = question().method("pie").chunks(found.chunks.clone());
    // Documents of the question stand behind them, as documents of their own.
    let prompt = question.to_prompt(&engine).unwrap();
    let indices: Vec<usize> = prompt.chunks.iter().map(|chunk| chunk.document).collect();
    assert_eq!(indices, [0, 1, 2, 3, 4]);
    let stats = question.documents(Vec::new()).ask(&engine).unwrap().stats;
    let tokens: usize = found.chunks.iter().map(|chunk| chunk.tokens.len()).sum();
    assert_eq!((stats.document_tokens, stats.recomputed_tokens), (tokens, 0));
    // A program that keeps id and part gets the chunk again, and one program at a time has the folder.
    let again = kept.document(&found.sources[0].id, Some(&[0])).unwrap();
    assert_eq!(again.chunks, found.chunks[..1]);
    let twice = Library::open(&engine, folder.path()).unwrap_err();
    assert!(matches!(twice, refrain::corpus::Error::InUse { .. }), "{twice}");
    drop(kept);
    let reopened = Library::open(&engine, folder.path()).unwrap();
    let found_again = reopened.search("Bearing 2 runs 200 km", 2, false).unwrap();
    assert_eq!(found_again.chunks, found.chunks);
}

/// Two programs with folders of their own and a folder in common.
#[cfg(feature = "remote")]
#[test]
fn libraries_of_one_object_store_find_the_same() {
    use refrain::corpus::Source;
    use refrain::store::{FetchPolicy, Limits, RemoteOptions};
    let (shared, folders) =
        (tempfile::tempdir().unwrap(), [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]);
    let mut remote = RemoteOptions::new(format!("file://{}", shared.path().display()));
    // A busy machine may be slow.
    (remote.timeout, remote.policy) = (std::time::Duration::from_secs(60), FetchPolicy::Fetch);
    let [one, two] = folders.each_ref().map(|folder| {
        let chunks = folder.path().join("chunks");
        let store = Store::open_shared(&chunks, Limits::memory(1 << 26), &remote).unwrap();
        let engine = engine(folder).open_on(store).unwrap();
        Library::open(&engine, &chunks).unwrap()
    });
    let stored = one.put(&documents()).unwrap();
    assert!(stored.iter().all(|document| document.published == Some(true)));
    assert!(two.is_empty().unwrap());
    // By its id it is there before it has come.
    let id = stored[0].id.as_str();
    let by_id = two.document(id, None).unwrap();
    assert_eq!(by_id.chunks, one.document(id, None).unwrap().chunks);
    two.sync().unwrap();
    assert_eq!(two.documents().unwrap(), one.documents().unwrap());
    let found = |library: &Library| {
        let found = library.search("How many km does bearing 2 run?", 3, false).unwrap();
        let score = |source: &Source| source.chunks.iter().map(|chunk| chunk.score).collect::<Vec<_>>();
        (found.chunks.clone(), found.sources.iter().map(score).collect::<Vec<_>>())
    };
    assert_eq!(found(&one), found(&two));
    assert_eq!(found(&two).0.len(), 3);
    // The further a removal goes, the less is found, and the same everywhere.
    two.remove(id).unwrap();
    assert_eq!(found(&two).0.len(), 2);
    one.sync().unwrap();
    assert_eq!(found(&one), found(&two));
    assert!(one.document(id, None).is_err() && one.remove(id).is_err());
}
