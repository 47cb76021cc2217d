//! Runs on a tiny model: stopped, torn, gone on with, and failing.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use refrain::engine::{Engine, Settings};
use refrain::store::{KvQuantization, Store};
use refrain_eval::Scorer;
use refrain_eval::run::{Run, RunProgress, merge, read};
use refrain_eval::tasks::{LoadedTask, TaskModel, load};
use refrain_eval::{Judge, MachineInfo, Matrix, Record, RunInfo, RunOptions, TaskSpec, VanillaCost, Variant};

fn engine() -> Engine {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
    let settings = Settings { chunk_tokens: 64, ..Settings::default() };
    Engine::open(&path, Store::in_memory(1 << 28), settings, |_, _| ()).unwrap()
}

fn jobs(engine: &Engine, matrix: &Matrix) -> Vec<LoadedTask> {
    let context = engine.decoder().config().context;
    let model = TaskModel { name: "tiny", tokenizer: engine.tokenizer(), context, chunk_tokens: 64 };
    load(matrix, &model).unwrap().0
}

/// Two tasks that fit the model's context of 512 tokens.
fn matrix() -> Matrix {
    let task = |name: &str, lengths| TaskSpec { name: name.to_owned(), lengths, ..TaskSpec::default() };
    Matrix {
        limit: Some(3),
        max_tokens: Some(8),
        tasks: vec![task("ruler/niah_single_1", vec![400]), task("needle", vec![380])],
        ..Matrix::default()
    }
}

fn variants(specs: &[(&str, &str)]) -> Vec<Variant> {
    let variant = |(method, policy): &(&str, &str)| Variant {
        method: (*method).to_owned(),
        fusion: refrain::fusion::METHODS.parse(method.trim_end_matches(":store_dtype=q4")).unwrap(),
        prefix: refrain::engine::Prefix::None,
        store_dtype: if method.ends_with(":store_dtype=q4") {
            KvQuantization::Q4
        } else {
            KvQuantization::Exact
        },
        oracle: None,
        policy: (*policy).to_owned(),
        eviction: refrain::eviction::POLICIES.parse(policy).unwrap(),
    };
    specs.iter().map(variant).collect()
}

fn about(jobs: &[LoadedTask]) -> RunInfo {
    let tasks = jobs.iter().map(|job| job.about.clone()).collect();
    RunInfo {
        seed: 42,
        tasks,
        settings: [("forced".to_owned(), "4".to_owned())].into(),
        ..RunInfo::default()
    }
}

/// Goes on with a run for at most so many batches of answers; returns whether all is done.
fn go_on(folder: &Path, engine: &Engine, jobs: &[LoadedTask], most: usize, batch: usize) -> bool {
    let variants = variants(&[
        ("vanilla", "full"),
        ("pie", "full"),
        ("pie:store_dtype=q4", "full"),
        ("info_flow:reorder=true", "full"),
        ("a3:ratio=0.3", "morph_kv:capacity=40,window=8"),
    ]);
    let options = RunOptions { forced: 4, maps: true, seed: 42, batch, until: None };
    let encode = |_: &str| Vec::new();
    let scorer = Scorer { judge: None, quality: None, encode: &encode };
    let mut run = Run::open(folder, about(jobs)).unwrap();
    let mut left = most;
    let go_on = |_: RunProgress<'_>| {
        left = left.saturating_sub(1);
        left > 0
    };
    run.answer(("tiny", engine), jobs, &variants, &options, &scorer, go_on).unwrap()
}

fn without_chance(records: Vec<Record>) -> Vec<Record> {
    let clean = |mut record: Record| {
        record.finished = 0;
        if let Some(cost) = &mut record.cost {
            (cost.ttft, cost.compute_ttft, cost.tpot) = (0.0, 0.0, None);
            cost.vanilla = None;
            // How many layers wait at a time depends on the loaders.
            cost.kv_bytes_peak = 0;
        }
        record
    };
    let mut records: Vec<Record> = records.into_iter().map(clean).collect();
    records.sort_by_key(|r| (r.task.clone(), r.sample.clone(), r.method.clone()));
    records
}

#[test]
fn a_run_that_is_stopped_and_torn_goes_on_to_the_same_records() {
    let engine = engine();
    let jobs = jobs(&engine, &matrix());
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    assert!(go_on(whole.path(), &engine, &jobs, usize::MAX, 3));
    let (_, expected) = read(whole.path()).unwrap();
    assert_eq!(expected.len(), 2 * 3 * 5, "two tasks, three samples, five variants");
    let of = |method: &str| {
        let record = expected.iter().find(|record| record.method == method).unwrap();
        (record.cost.as_ref().unwrap().document_bytes, record.fidelity.as_ref().unwrap().kl)
    };
    let (exact, q4) = (of("pie"), of("pie:store_dtype=q4"));
    assert!(q4.0 < exact.0 && q4.1 > 0.0 && q4.1 != exact.1, "{exact:?} {q4:?}");
    for record in &expected {
        assert_eq!(record.error, None);
        let (cost, fidelity) = (record.cost.as_ref().unwrap(), record.fidelity.as_ref().unwrap());
        assert!(cost.ttft > 0.0 && cost.prompt_tokens > 300 && cost.answer_tokens > 0, "{cost:?}");
        let vanilla = cost.vanilla.unwrap();
        assert!(vanilla.ttft > 0.0 && vanilla.operations > 0.0, "{vanilla:?}");
        assert!(record.method != "vanilla" || vanilla == VanillaCost::from(cost), "{vanilla:?}");
        assert!(record.scores.contains_key("score") && fidelity.positions > 0);
        match record.method.as_str() {
            "vanilla" => assert_eq!((fidelity.kl, fidelity.top1, cost.recompute_ratio), (0.0, 1.0, 1.0)),
            "pie" | "pie:store_dtype=q4" => {
                assert!(fidelity.kl > 0.0 && cost.recompute_ratio == 0.0 && fidelity.hit_rate_40.is_none())
            }
            "info_flow:reorder=true" => assert!(fidelity.kl > 0.0 && fidelity.top1 > 0.0),
            _ => assert!(cost.kv_bytes < cost.kv_bytes_full && fidelity.hit_rate_40.is_some()),
        }
    }
    // The first sample of each task comes before the second of any.
    let order: Vec<&str> = expected.iter().step_by(5).map(|record| record.benchmark.as_str()).collect();
    assert_eq!(order[..2], ["ruler", "needle"]);

    let results = parts.path().join("results.jsonl");
    let mut sittings = 0;
    while !go_on(parts.path(), &engine, &jobs, 6, 1) {
        // Killed within a line.
        std::fs::OpenOptions::new()
            .append(true)
            .open(&results)
            .unwrap()
            .write_all(b"{\"model\":\"ti")
            .unwrap();
        sittings += 1;
        assert!(sittings < 20);
    }
    assert!(sittings > 2);
    let (_, found) = read(parts.path()).unwrap();
    assert_eq!(without_chance(found), without_chance(expected));
}

/// A variant whose chunks cannot be made fails alone, and a run that its time stops tells of failures until then.
#[test]
fn a_variant_without_its_prefix_fails_alone_and_is_told_when_the_time_is_up() {
    let engine = engine();
    let jobs = jobs(&engine, &matrix());
    let folder = tempfile::tempdir().unwrap();
    let mut variants = variants(&[("vanilla", "full"), ("pie", "full"), ("a3:ratio=0.3", "full")]);
    variants[2].prefix = refrain::engine::Prefix::Text(folder.path().join("missing.txt"));
    let limit = std::time::Duration::from_secs(2);
    let until = Some(std::time::Instant::now() + limit);
    let options = RunOptions { forced: 4, maps: false, seed: 42, batch: 3, until };
    let encode = |_: &str| Vec::new();
    let scorer = Scorer { judge: None, quality: None, encode: &encode };
    let mut run = Run::open(folder.path(), about(&jobs)).unwrap();
    let mut failed = Vec::new();
    let whole = run.answer(("tiny", &engine), &jobs, &variants, &options, &scorer, |step| {
        failed.push(step.failed);
        // No other sample begins in time.
        std::thread::sleep(limit);
        true
    });
    assert!(!whole.unwrap());
    assert_eq!(failed, [0, 1]);
    let (_, records) = read(folder.path()).unwrap();
    let errors: Vec<Option<&str>> = records.iter().map(|record| record.error.as_deref()).collect();
    assert_eq!(errors[..2], [None, None]);
    assert!(errors[2].unwrap().contains("missing.txt"), "{errors:?}");
}

#[test]
fn a_sample_that_fails_is_noted_and_the_others_go_on() {
    let engine = engine();
    let mut jobs = jobs(&engine, &matrix());
    let text = jobs[0].samples[1].documents[0].repeat(3);
    jobs[0].samples[1].documents = vec![text];
    let folder = tempfile::tempdir().unwrap();
    assert!(go_on(folder.path(), &engine, &jobs, usize::MAX, 1));
    let (_, records) = read(folder.path()).unwrap();
    let failed: Vec<&Record> = records.iter().filter(|record| record.error.is_some()).collect();
    assert_eq!((failed.len(), records.len()), (5, 30));
    assert!(
        failed.iter().all(|record| record.error.as_ref().unwrap().contains("512")),
        "{:?}",
        failed[0].error
    );
    assert!(failed.iter().all(|record| record.sample == jobs[0].samples[1].id && record.scores.is_empty()));
    // It is tried again, and nothing else is.
    assert!(go_on(folder.path(), &engine, &jobs, usize::MAX, 1));
    assert_eq!(read(folder.path()).unwrap().1.len(), 35);
}

#[test]
fn an_answer_ends_where_the_context_does() {
    let engine = engine();
    let mut jobs = jobs(&engine, &matrix());
    jobs.truncate(1);
    jobs[0].samples.truncate(2);
    jobs[0].samples[0].max_tokens = 32_768;
    let folder = tempfile::tempdir().unwrap();
    assert!(go_on(folder.path(), &engine, &jobs, usize::MAX, 3));
    let (_, records) = read(folder.path()).unwrap();
    assert_eq!(records.len(), 10);
    for record in &records {
        let cost = record.cost.as_ref().unwrap();
        let is_cut = record.sample == jobs[0].samples[0].id;
        let room = is_cut.then_some(512 - cost.prompt_tokens);
        assert_eq!((&record.error, record.answer_room), (&None, room), "{}", record.method);
        assert!(cost.answer_tokens <= room.unwrap_or(8), "{cost:?}");
    }
}

#[test]
fn answers_without_a_judge_are_graded_later_and_not_made_again() {
    let engine = engine();
    let mut jobs = jobs(&engine, &matrix());
    jobs[0].samples.truncate(1);
    jobs[1].samples.truncate(1);
    let folder = tempfile::tempdir().unwrap();
    assert!(go_on(folder.path(), &engine, &jobs, usize::MAX, 3));
    let (_, before) = read(folder.path()).unwrap();
    jobs[0].about.judge = Some("judge".to_owned());
    // The first sitting with the judge is stopped.
    assert!(!go_on(folder.path(), &engine, &jobs, 2, 3));
    assert!(go_on(folder.path(), &engine, &jobs, usize::MAX, 3));
    let (_, all) = read(folder.path()).unwrap();
    assert_eq!((before.len(), all.len()), (10, 15), "five of one task");
    for graded in &all[10..] {
        let method = |record: &&Record| (&record.task, &record.method) == (&graded.task, &graded.method);
        let ungraded = before.iter().find(method).unwrap();
        assert_eq!((graded.judge.as_deref(), &ungraded.judge), (Some("judge"), &None));
        assert_eq!(
            (&graded.cost, &graded.answer),
            (&ungraded.cost, &ungraded.answer),
            "times are those of before"
        );
    }
    assert!(go_on(folder.path(), &engine, &jobs, usize::MAX, 3));
    assert_eq!(read(folder.path()).unwrap().1.len(), 15);
}

/// The URL of a judge that gives each request this reply.
fn judge_that_replies(status: u16, content: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let reply = serde_json::json!({ "choices": [{ "message": { "content": content } }] }).to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map(Result::unwrap) {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut line, mut length) = (String::new(), 0);
            while reader.read_line(&mut line).unwrap() > 2 {
                let header = line.to_lowercase();
                if let Some(bytes) = header.strip_prefix("content-length: ") {
                    length = bytes.trim().parse().unwrap();
                }
                line.clear();
            }
            reader.read_exact(&mut vec![0; length]).unwrap();
            let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close", reply.len());
            write!(stream, "{head}\r\n\r\n{reply}").unwrap();
        }
    });
    url
}

#[test]
fn answers_that_the_judge_fails_to_grade_are_kept_and_bind_the_run_to_no_judge() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("longbench_write_en.jsonl"), r#"{"prompt": "Write.", "length": 4}"#)
        .unwrap();
    let matrix = Matrix {
        data: Some(folder.path().to_owned()),
        max_tokens: Some(4),
        tasks: vec![TaskSpec { name: "longwriter/en".to_owned(), ..TaskSpec::default() }],
        ..Matrix::default()
    };
    let (mut jobs, variants) = (jobs(&engine, &matrix), variants(&[("vanilla", "full"), ("pie", "full")]));
    let options = RunOptions { forced: 4, maps: false, seed: 42, batch: 2, until: None };
    let mut sitting = |model: &str, status, content| {
        jobs[0].about.judge = Some(model.to_owned());
        let mut run = Run::open(folder.path(), about(&jobs))?;
        let judge =
            Judge::new(&judge_that_replies(status, content), model, None, ureq::Agent::config_builder());
        let encode = |_: &str| Vec::new();
        let scorer = Scorer { judge: Some(&judge), quality: Some("$INST$ $RESPONSE$"), encode: &encode };
        let mut failed = 0;
        run.answer(("tiny", &engine), &jobs, &variants, &options, &scorer, |step| {
            failed = step.failed;
            true
        })?;
        Ok::<_, refrain_eval::Error>((failed, read(folder.path())?.1))
    };
    let (failed, kept) = sitting("typo", 400, "no").unwrap();
    assert_eq!((failed, kept.len()), (2, 2));
    for record in &kept {
        assert_eq!((&record.error, &record.judge), (&None, &None));
        assert!(record.judge_error.as_ref().unwrap().contains("400") && record.cost.is_some(), "{record:?}");
        assert!(record.scores.contains_key("score") && record.scores.contains_key("words"), "{record:?}");
    }
    let grades = r#"{"Relevance": 5, "Accuracy": 5, "Coherence": 5, "Clarity": 5, "Breadth and Depth": 5, "Reading Experience": 5}"#;
    let (failed, all) = sitting("judge", 200, grades).unwrap();
    assert_eq!((failed, all.len()), (0, 4));
    for (graded, kept) in all[2..].iter().zip(&kept) {
        assert_eq!((graded.judge.as_deref(), &graded.judge_error), (Some("judge"), &None));
        assert_eq!((&graded.answer, &graded.cost, graded.scores["quality"]), (&kept.answer, &kept.cost, 1.0));
    }
    assert!(sitting("other", 200, grades).unwrap_err().to_string().contains("the judge judge, not other"));
}

#[cfg(feature = "emulate")]
mod gpu {
    use std::sync::Arc;

    use refrain::engine::DeviceFailure;
    use refrain::kernels::Device;
    use refrain_cuda::{CudaDevice, Emulated};
    use refrain_eval::Error;

    use super::*;

    const MEMORY: u64 = 64 << 20;

    /// Runs two methods over two samples; before a batch of answers `before` is called with its number.
    fn answer(folder: &Path, gpu: &Emulated, before: impl Fn(usize)) -> refrain_eval::Result<bool> {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny/llama");
        let device: Arc<dyn Device> = Arc::new(CudaDevice::new(gpu.clone(), 1).unwrap());
        let (settings, store) =
            (Settings { chunk_tokens: 64, ..Settings::default() }, Store::in_memory(1 << 28));
        let engine = Engine::open_on(&device, &path, store, settings, |_, _| ()).unwrap();
        let mut jobs = jobs(&engine, &matrix());
        jobs.truncate(1);
        jobs[0].samples.truncate(2);
        let variants = variants(&[("vanilla", "full"), ("pie", "full")]);
        let options = RunOptions { forced: 4, maps: false, seed: 42, batch: 1, until: None };
        let encode = |_: &str| Vec::new();
        let scorer = Scorer { judge: None, quality: None, encode: &encode };
        let mut run = Run::open(folder, about(&jobs)).unwrap();
        let mut batch = 0;
        run.answer(("tiny", &engine), &jobs, &variants, &options, &scorer, |_| {
            before(batch);
            batch += 1;
            true
        })
    }

    /// The answered samples, and the errors of the others.
    fn found(folder: &Path) -> (usize, Vec<String>) {
        let (_, records) = read(folder).unwrap();
        let errors: Vec<String> = records.iter().filter_map(|record| record.error.clone()).collect();
        (records.len() - errors.len(), errors)
    }

    #[test]
    fn a_gpu_that_has_failed_ends_the_run_which_goes_on_later() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = Emulated::with_memory(1, MEMORY);
        let fail = |batch| {
            if batch == 3 {
                gpu.fail("an illegal address")
            }
        };
        let error = answer(folder.path(), &gpu, fail).unwrap_err();
        assert!(matches!(error, Error::Device(DeviceFailure::Broken { .. })), "{error}");
        for part in ["emulated CUDA has failed", "an illegal address", "are kept", "goes on with the others"]
        {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!(found(folder.path()), (3, vec![]), "the others are no failures of their samples");
        assert!(answer(folder.path(), &Emulated::with_memory(1, MEMORY), |_| ()).unwrap());
        assert_eq!(found(folder.path()), (4, vec![]));
    }

    #[test]
    fn a_sample_without_memory_fails_alone() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = Emulated::with_memory(1, MEMORY);
        assert!(
            answer(folder.path(), &gpu, |batch| gpu.fragment(if batch == 1 { 300 } else { MEMORY })).unwrap()
        );
        let (answered, errors) = found(folder.path());
        assert_eq!((answered, errors.len()), (3, 1));
        assert!(errors[0].contains("out of memory"), "{}", errors[0]);
    }
}

#[test]
fn a_run_goes_on_only_with_the_same_settings_and_tells_a_broken_line() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine();
    let jobs = jobs(&engine, &matrix());
    drop(Run::open(folder.path(), about(&jobs)).unwrap());
    let refused = |about| Run::open(folder.path(), about).unwrap_err().to_string();
    assert!(refused(RunInfo { seed: 7, ..about(&jobs) }).contains("seed 42, not 7"));
    let settings = [("forced".to_owned(), "5".to_owned())].into();
    assert!(refused(RunInfo { settings, ..about(&jobs) }).contains("forced 4, not 5"));
    // Another task joins those that were there.
    let mut more = about(&jobs[..1]);
    more.methods.push("a3".to_owned());
    drop(Run::open(folder.path(), more).unwrap());
    let (about_now, _) = read(folder.path()).unwrap();
    assert_eq!((about_now.tasks.len(), about_now.methods), (2, vec!["a3".to_owned()]));
    // All commands and matrices that made it stand there, each once.
    for command in ["one", "two", "one"] {
        let matrix = format!("seed of {command}");
        drop(
            Run::open(folder.path(), RunInfo { command: command.to_owned(), matrix, ..about(&jobs) })
                .unwrap(),
        );
    }
    let machine = MachineInfo { cpu: "another".to_owned(), ..MachineInfo::default() };
    let run = Run::open(folder.path(), RunInfo { machine, ..about(&jobs) }).unwrap();
    assert!(run.changes()[0].contains("machine") && run.changes().len() == 1, "{:?}", run.changes());
    drop(run);
    let (about_now, _) = read(folder.path()).unwrap();
    assert_eq!(about_now.command, "one\ntwo");
    assert_eq!(about_now.matrix, "seed of one\n# then\nseed of two");
    std::fs::write(folder.path().join("results.jsonl"), "{}\nnonsense\n").unwrap();
    let error = read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("results.jsonl") && error.contains("line 1"), "{error}");
    assert!(read(&folder.path().join("none")).unwrap_err().to_string().contains("folder of a run"));
}

#[test]
fn the_example_matrices_name_what_there_is() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/eval");
    let tasks: Vec<String> = refrain_eval::tasks::names().into_iter().map(|(name, _)| name).collect();
    let mut found = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let matrix = Matrix::read(&entry.unwrap().path()).unwrap();
        for method in &matrix.methods {
            refrain::fusion::METHODS.parse(method).unwrap();
        }
        matrix.store_dtype.iter().for_each(|name| _ = name.parse::<KvQuantization>().unwrap());
        matrix.prefix.iter().for_each(|text| _ = text.parse::<refrain::engine::Prefix>().unwrap());
        for policy in &matrix.policies {
            refrain::eviction::POLICIES.parse(policy).unwrap();
        }
        for task in &matrix.tasks {
            let name = task.name.trim_end_matches("_short");
            let name = if name.starts_with("rag/") { "rag/NAME" } else { name };
            assert!(tasks.iter().any(|known| known == name), "{name}");
        }
        found += 1;
    }
    assert!(found > 4);
}

/// Samples that are answered in parts, in whatever order, make the run that one program would have made.
#[test]
fn a_run_that_is_made_in_parts_is_merged_to_the_same_records() {
    let engine = engine();
    let jobs = jobs(&engine, &matrix());
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [whole, merged, broken] = &folders;
    assert!(go_on(whole.path(), &engine, &jobs, usize::MAX, 3));
    let mut parts = Vec::new();
    for (index, job) in jobs.iter().enumerate().rev() {
        for samples in job.samples.chunks(2) {
            let folder = tempfile::tempdir().unwrap();
            let part = LoadedTask { samples: samples.to_vec(), ..job.clone() };
            assert!(go_on(folder.path(), &engine, &[part], usize::MAX, 1));
            let (mut about, records) = read(folder.path()).unwrap();
            about.machine = MachineInfo { cpu: format!("CPU {index}"), ..MachineInfo::default() };
            (about.seconds, about.started) = (10.0, 100 - index as u64);
            parts.push((about, records));
        }
    }
    assert_eq!(parts.len(), 4);
    // The first half comes before the others are done, and again with them.
    let changes = merge(merged.path(), parts[..2].to_vec()).unwrap();
    assert_eq!(changes, [""; 0], "both are of one machine");
    let changes = merge(merged.path(), parts.clone()).unwrap();
    assert!(changes.len() == 1 && changes[0].contains("the machine CPU 1 ("), "{changes:?}");
    let ((about, records), (expected_about, expected)) =
        (read(merged.path()).unwrap(), read(whole.path()).unwrap());
    // Alone and together, answers of a batch have the same text; only what depends on the batch differs.
    let texts = |records: Vec<Record>| -> Vec<_> {
        let records = without_chance(records).into_iter();
        records
            .map(|record| (record.task, record.sample, record.method, record.answer, record.scores))
            .collect()
    };
    assert_eq!(texts(records), texts(expected));
    assert_eq!((about.machine.cpu.as_str(), about.started), ("CPU 1, CPU 0", 99));
    assert!((40.0..41.0).contains(&about.seconds), "{}", about.seconds);
    let samples = |about: &RunInfo| -> usize { about.tasks.iter().map(|task| task.samples).sum() };
    assert_eq!((about.tasks.len(), samples(&about)), (2, samples(&expected_about)));

    parts[1].0.seed = 7;
    let error = merge(broken.path(), parts).unwrap_err().to_string();
    assert!(error.contains("seed"), "{error}");
    assert!(merge(broken.path(), []).is_err() && !broken.path().join("results.jsonl").exists());
}
