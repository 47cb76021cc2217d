//! Tests on made records.

use std::collections::BTreeMap;

use super::table::{Block, Section, Table};
use super::*;
use crate::{Cost, Fidelity, MachineInfo, ModelInfo, TaskInfo, VanillaCost};

const MODELS: [&str; 2] = ["tiny", "<script>alert('m')</script>"];
const METHODS: [&str; 5] = ["vanilla", "full_reuse", "cache-blend", "a3:ratio=0.15", "a3:ratio=0.5"];
const SAMPLES: usize = 6;

/// Score of a sample: the task's level, less what the method loses, on a slope over samples.
fn score(task: &str, method: &str, sample: usize) -> f64 {
    let level = match task {
        "qasper" => 0.5,
        "passage_count" => 0.0,
        _ => 0.7,
    };
    let kept = match method {
        "vanilla" => 1.0,
        "full_reuse" => 0.2,
        "cache-blend" => 0.8,
        _ => 0.9,
    };
    level * kept * (0.75 + 0.1 * sample as f64)
}

fn record(model: &str, task: &str, method: &str, sample: usize) -> Record {
    let speed = if method == "vanilla" { 1.0 } else { 2.0 + sample as f64 };
    let far = 1.0 - score("other", method, 0) / score("other", "vanilla", 0);
    let (kl, kv) = (far * (1.0 + sample as f64), 1000 / METHODS.len());
    Record {
        model: model.to_owned(),
        benchmark: "longbench".to_owned(),
        task: task.to_owned(),
        sample: sample.to_string(),
        method: method.to_owned(),
        policy: "full".to_owned(),
        scores: BTreeMap::from([("score".to_owned(), score(task, method, sample))]),
        fidelity: Some(Fidelity {
            kl,
            top1: 0.5,
            positions: 8,
            hit_rate_40: Some(0.25),
            ..Fidelity::default()
        }),
        cost: Some(Cost {
            document_tokens: 100,
            ttft: 6.0 / speed,
            kv_bytes: kv,
            kv_bytes_full: 1000,
            ..Cost::default()
        }),
        ..Record::default()
    }
}

/// Two models, three tasks of which one is hopeless, five methods, some failures, and a grid of needles.
fn run() -> (RunInfo, Vec<Record>) {
    let mut records = Vec::new();
    for model in MODELS {
        for task in ["qasper", "hotpotqa", "passage_count"] {
            for method in METHODS {
                records.extend((0..SAMPLES).map(|sample| record(model, task, method, sample)));
            }
        }
        for (length, depth) in [(1000, 0.0), (1000, 50.0), (2000, 0.0), (2000, 50.0)] {
            let mut needle = record(model, "needle", "vanilla", 0);
            (needle.benchmark, needle.length, needle.depth) =
                ("needle".to_owned(), Some(length), Some(depth));
            needle.scores.insert("score".to_owned(), length as f64 / 4000.0 + depth / 100.0);
            records.push(needle);
        }
    }
    // Aggregate a repeated sample the last record counts.
    let mut failed =
        Record { error: Some("too long: <script>1</script> | \"x\", y".to_owned()), ..records[6].clone() };
    (failed.scores, failed.fidelity, failed.cost) = (BTreeMap::new(), None, None);
    records.push(failed);
    let task = |task: &str, benchmark: &str, length, scale| TaskInfo {
        benchmark: benchmark.to_owned(),
        task: task.to_owned(),
        length,
        scale,
        samples: SAMPLES,
        of: Some(200),
        note: format!("{task} is a <b>subset</b>"),
        ..TaskInfo::default()
    };
    let about = RunInfo {
        version: "1".to_owned(),
        command: "run <script>".to_owned(),
        matrix: "a = \"</pre>\"".to_owned(),
        machine: MachineInfo { cpu: "<cpu>".to_owned(), ..MachineInfo::default() },
        models: MODELS.map(|name| ModelInfo { name: name.to_owned(), ..ModelInfo::default() }).into(),
        tasks: vec![
            task("hotpotqa", "longbench", None, 100.0),
            task("qasper", "longbench", None, 100.0),
            task("passage_count", "longbench", None, 100.0),
            task("needle", "needle", Some(1000), 10.0),
            task("needle", "needle", Some(2000), 10.0),
        ],
        methods: METHODS.map(str::to_owned).into(),
        policies: vec!["full".to_owned()],
        ..RunInfo::default()
    };
    (about, records)
}

fn tables(sections: &[Section]) -> Vec<&Table> {
    let blocks = sections.iter().flat_map(|section| &section.blocks);
    blocks.filter_map(|block| if let Block::Table(table) = block { Some(table) } else { None }).collect()
}

/// The cell of a row and a column, by how their names begin.
fn cell<'a>(table: &'a Table, row: &str, column: &str) -> &'a table::Cell {
    let column = table.columns.iter().position(|c| c.title.starts_with(column)).expect(column);
    let row = table.rows.iter().find(|r| r.label == row).expect(row);
    &row.cells[column]
}

/// The verdict on the first model.
fn verdict<'a>(claims: &'a Table, says: &str, by: &str) -> Option<&'a str> {
    let start = claims.rows.iter().position(|row| row.group.starts_with(says))?;
    let own = |row: &&table::Row| row.label == "tiny" && row.cells[1].value.starts_with(by);
    claims.rows[start..].iter().find(own).map(|row| row.cells[2].value.as_str())
}

#[test]
fn tables_have_what_a_hand_computes() {
    let (about, records) = run();
    let sections = sections(&data::Data::new(&about, &records));
    let tables = tables(&sections);
    let table = |title: &str| *tables.iter().find(|table| table.title == title).expect(title);
    let scores = table("LongBench: tiny");
    // The paper's order, vanilla first; variants that the paper lacks stand below.
    let titles: Vec<&str> = scores.columns.iter().map(|column| column.title.as_str()).collect();
    assert_eq!(titles, ["qasper", "hotpotqa", "passage_count", "Avg"]);
    assert_eq!(scores.columns[0].sub, "6 of 200");
    let labels: Vec<&str> = scores.rows.iter().map(|row| row.label.as_str()).collect();
    assert_eq!(labels, ["Vanilla", "FullReuse", "CacheBlend", "A3", "A3 (ratio=0.5)"]);
    assert!(!scores.rows[4].group.is_empty() && scores.rows[..4].iter().all(|row| row.group.is_empty()));
    // The mean of 0.75, 0.85, …, 1.25 is 1; FullReuse's first sample of qasper failed, and the rest have 1.05.
    assert_eq!(cell(scores, "Vanilla", "qasper").value, "50.00");
    assert_eq!(cell(scores, "CacheBlend", "hotpotqa").value, "56.00");
    let failed = cell(scores, "FullReuse", "qasper");
    assert_eq!((failed.value.as_str(), failed.note.as_str()), ("10.50", "1 failed"));
    assert_eq!(cell(scores, "FullReuse", "Avg").value, "12.25");
    assert_eq!(cell(scores, "A3", "Avg").value, "54.00");
    // A task that vanilla cannot do is marked, and no part of averages.
    assert!(scores.columns[2].sub.contains("says nothing") && scores.columns[3].sub == "2 tasks");
    assert!(scores.notes.iter().any(|note| note.contains("passage_count says nothing about quality")));

    let summary = table("All tasks: tiny");
    assert_eq!(cell(summary, "CacheBlend", "Score").value, "80.0 %");
    assert_eq!(cell(summary, "FullReuse", "Score").value, "20.0 %");
    // Speed-ups are 2 to 7 for each of three tasks.
    assert_eq!(cell(summary, "A3", "TTFT").value, "4.50×");
    assert_eq!(cell(summary, "A3", "KL").value, "0.350");
    assert_eq!(cell(summary, "A3", "KV, share").value, "20.0 %");
    assert_eq!(
        [cell(summary, "Vanilla", "Tasks"), cell(summary, "A3", "Tasks")].map(|c| &c.value[..]),
        ["5", "3"]
    );

    let claims = table("Statements of the papers");
    let verdict = |says: &str, by: &str| verdict(claims, says, by);
    assert_eq!(verdict("A3 is better than CacheBlend", "score"), Some("agrees"));
    assert_eq!(verdict("A3 is better than CacheBlend", "KL"), Some("agrees"));
    assert_eq!(verdict("FullReuse collapses", "score"), Some("agrees"));
    assert_eq!(verdict("CacheBlend's first token", "TTFT"), Some("agrees"));
    assert_eq!(verdict("A3 is better than PIE", "score"), None);
}

#[test]
fn answers_whose_chunks_were_prefilled_within_them_have_no_time() {
    let (about, mut records) = run();
    let notes = |records: &[Record]| {
        let sections = sections(&data::Data::new(&about, records));
        let summary = *tables(&sections).iter().find(|table| table.title == "All tasks: tiny").unwrap();
        (cell(summary, "A3", "TTFT").value.clone(), summary.notes.concat())
    };
    assert!(!notes(&records).1.contains("no time to the first token"));
    // The slow ones: what is left is 4 to 7 times as fast.
    let slow = records.iter_mut().filter(|record| {
        record.model == "tiny"
            && record.method == "a3:ratio=0.15"
            && ["0", "1"].contains(&record.sample.as_str())
    });
    slow.for_each(|record| record.cost.as_mut().unwrap().prefilled_chunks = 3);
    let (speed_up, notes) = notes(&records);
    assert_eq!(speed_up, "5.50×");
    assert!(
        notes.contains("6 answers have no time to the first token") && notes.contains("--memory"),
        "{notes}"
    );
}

#[test]
fn shares_of_documents_are_of_prompts_that_have_some() {
    let (about, mut records) = run();
    for record in &mut records {
        let Some(cost) = &mut record.cost else { continue };
        (cost.recompute_ratio, cost.charged_ratio) = (0.5, 1.0);
        if record.task == "hotpotqa" || record.task == "passage_count" {
            *cost = Cost { document_tokens: 0, recompute_ratio: 0.0, charged_ratio: 0.0, ..cost.clone() };
        }
    }
    let charged = |records: &[Record]| {
        let sections = sections(&data::Data::new(&about, records));
        let summary = *tables(&sections).iter().find(|table| table.title == "All tasks: tiny").unwrap();
        let charged = summary.columns.iter().any(|column| column.title == "Charged");
        charged.then(|| cell(summary, "Vanilla", "Charged").value.clone())
    };
    assert_eq!(charged(&records).as_deref(), Some("100.0 %"));
    records.retain(|record| record.task == "hotpotqa");
    assert_eq!(charged(&records), None);
}

#[test]
fn claims_can_be_contradicted_or_undecided() {
    let (about, mut records) = run();
    for record in &mut records {
        let score = record.scores.entry("score".to_owned()).or_default();
        let odd = record.sample.parse::<usize>().is_ok_and(|sample| sample % 2 == 1);
        if record.method == "cache-blend" {
            *score += 0.3;
        } else if record.method == "full_reuse" {
            *score += if odd { 0.4 } else { 0.0 };
        }
    }
    let sections = sections(&data::Data::new(&about, &records));
    let claims = *tables(&sections).last().unwrap();
    assert_eq!(verdict(claims, "A3 is better than CacheBlend", "score"), Some("contradicts"));
    assert_eq!(verdict(claims, "FullReuse collapses", "score"), Some("undecided"));
}

#[test]
fn published_and_measured_share_no_table() {
    let (about, records) = run();
    let sections = sections(&data::Data::new(&about, &records));
    let (published, measured): (Vec<&Table>, Vec<&Table>) =
        tables(&sections).into_iter().partition(|table| table.source.is_some());
    assert!(!published.is_empty());
    let values = |tables: &[&Table]| -> Vec<String> {
        tables
            .iter()
            .flat_map(|t| &t.rows)
            .flat_map(|row| &row.cells)
            .map(|cell| cell.value.clone())
            .collect()
    };
    assert!(values(&published).contains(&"44.93".to_owned()));
    assert!(!values(&measured).contains(&"44.93".to_owned()));
    for table in &published {
        assert!(table.source.as_ref().is_some_and(|source| source.contains("arXiv:")));
        assert!(table.rows.iter().all(|row| row.cells.len() == table.columns.len()), "{}", table.title);
        assert!(table.rows.iter().flat_map(|row| &row.cells).all(|cell| cell.interval.is_empty()));
    }
    let html = html::render("", &sections);
    assert_eq!(html.matches("<b>Published</b>").count(), published.len());
}

#[test]
fn html_is_one_file_in_which_nothing_given_is_markup() {
    let (about, records) = run();
    let html = report(&about, &records).html;
    for wrong in ["<script", "<cpu", "<b>subset", "</pre>\"", "src=", "@import", "url(", "<link", "<iframe"] {
        assert!(!html.contains(wrong), "{wrong}");
    }
    assert!(html.contains("&lt;script&gt;1&lt;/script&gt;") && html.contains("&lt;cpu&gt;"));
    for target in html.split("href=\"").skip(1) {
        assert!(target.starts_with('#') || target.starts_with("https://arxiv.org/"), "{target:.40}");
    }
    assert!(html.matches("http").count() == html.matches("<a href=\"http").count());
    // Everything that is opened is closed, in order.
    let mut open = Vec::new();
    for tag in html.split("</style>").nth(1).unwrap().split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        match tag.starts_with('/') {
            true => assert_eq!(open.pop(), (!["head", "body", "html"].contains(&name)).then_some(name)),
            false if tag.ends_with('/') || ["wbr", "body", "br"].contains(&name) => {}
            false => open.push(name),
        }
    }
    assert!(open.is_empty() && !html.contains("NaN"));
    assert!(html.contains("scope=\"row\"") && html.contains("scope=\"col\"") && html.contains("<desc>"));
}

#[test]
fn markdown_has_the_same_tables() {
    let (about, records) = run();
    let sections = sections(&data::Data::new(&about, &records));
    let markdown = report(&about, &records).markdown;
    assert_eq!(markdown.matches("\n### ").count(), tables(&sections).len());
    // Indented lines are code, in which nothing is markup.
    let text: String = markdown.lines().filter(|line| !line.starts_with("    ")).collect();
    assert!(
        !text.contains("<script") && !text.contains("<b>subset") && markdown.contains("    run <script>\n")
    );
    assert!(markdown.contains("| too long: &lt;script&gt;1&lt;/script&gt; \\| \"x\", y | 1 |"));
    for lines in markdown.lines().collect::<Vec<_>>().windows(2).filter(|lines| lines[1].starts_with("| ---"))
    {
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        assert_eq!(cells(lines[0]), cells(lines[1]));
    }
}

#[test]
fn csv_is_quoted_and_has_depths() {
    let (about, mut records) = run();
    for record in records.iter_mut().filter(|record| record.task == "hotpotqa") {
        record.task = "a, \"b\"".to_owned();
    }
    let csv = report(&about, &records).csv;
    assert!(
        csv.starts_with(
            "model,benchmark,task,length,depth,method,policy,name,value,low,high,samples,scale\n"
        )
    );
    let (_, score) =
        csv.split_once("tiny,longbench,\"a, \"\"b\"\"\",,,vanilla,full,score,").expect("a quoted task");
    let numbers: Vec<f64> =
        score.lines().next().unwrap().split(',').map(|cell| cell.parse().unwrap()).collect();
    assert!((numbers[0] - 70.0).abs() < 1e-9 && numbers[1] < 70.0 && numbers[2] > 70.0, "{numbers:?}");
    assert_eq!(numbers[3..], [6.0, 100.0]);
    assert!(csv.contains("tiny,needle,needle,2000,50,vanilla,full,score,10,10,10,1,10\n"));
    assert!(csv.contains("tiny,needle,needle,1000,,vanilla,full,score,5,2.5,7.5,2,10\n"));
    assert!(csv.contains("tiny,longbench,qasper,,,full_reuse,full,failed,1,1,1,1,1\n"));
    assert_eq!(report(&about, &records).csv, csv);
}

#[test]
fn figures_show_the_grid_and_the_ratios() {
    let (about, records) = run();
    let html = report(&about, &records).html;
    // A cell a length and depth, on the scale 0 to 10.
    for (value, times) in [("2.5", 2), ("7.5", 2), ("5.0", 2), ("10.0", 2)] {
        assert_eq!(html.matches(&format!(">{value}</text>")).count(), times, "{value}");
    }
    assert!(html.contains("Recompute ratio (as A3, figure 6c)") && !html.contains("Attention by layer"));
}

#[test]
fn what_is_not_there_is_left_out() {
    let empty = report(&RunInfo::default(), &[]);
    assert!(empty.html.contains("</html>") && !empty.html.contains("Against the papers"));
    let lone =
        Record { scores: BTreeMap::new(), error: Some("no".to_owned()), ..record("m", "qasper", "a3", 0) };
    let lone = report(&RunInfo::default(), &[lone]);
    assert!(lone.html.contains("Vanilla was not run") && !lone.html.contains("arXiv:2503.00979"));
}

/// The text of the advice on fusion methods.
fn fusion_advice<'a>(sections: &'a [Section]) -> Option<&'a str> {
    let said = |block: &'a Block| match block {
        Block::Text(text) if text.starts_with("Fusion on") => Some(text.as_str()),
        _ => None,
    };
    sections.iter().flat_map(|section| &section.blocks).find_map(said)
}

/// A record of a task with these scores.
fn scored(benchmark: &str, task: &str, variant: [&str; 2], sample: usize, scores: &[(&str, f64)]) -> Record {
    Record {
        benchmark: benchmark.to_owned(),
        policy: variant[1].to_owned(),
        scores: scores.iter().map(|(name, score)| ((*name).to_owned(), *score)).collect(),
        ..record("tiny", task, variant[0], sample)
    }
}

fn all_sections(records: &[Record]) -> Vec<Section> {
    sections(&data::Data::new(&RunInfo::default(), records))
}

fn titled<'a>(sections: &'a [Section], title: &str) -> Option<&'a Table> {
    tables(sections).into_iter().find(|table| table.title.starts_with(title))
}

#[test]
fn every_score_has_a_table() {
    let run = |benchmark: &str, task: &str, variants: &[[&str; 2]]| -> Vec<Record> {
        let one = |variant: &[&str; 2]| {
            (0..9).map(|sample| scored(benchmark, task, *variant, sample, &[("score", 0.5)])).collect()
        };
        variants.iter().flat_map::<Vec<Record>, _>(one).collect()
    };
    let vanilla = ["vanilla", "full"];
    // Vanilla alone of a placed task, eviction where only fusion is placed, and fusion where only eviction is.
    for (benchmark, task, variants) in [
        ("longbench", "qasper", vec![vanilla]),
        ("ruler", "vt", vec![vanilla, ["vanilla", "h2o"]]),
        ("rag", "dureader", vec![vanilla, ["vanilla", "h2o"]]),
        ("longbench", "qmsum", vec![vanilla, ["a3", "full"]]),
    ] {
        let sections = all_sections(&run(benchmark, task, &variants));
        let table = titled(&sections, &format!("{benchmark}: tiny")).expect(task);
        assert_eq!((table.rows.len(), table.columns[0].title.as_str()), (variants.len(), task));
    }
    let sections = all_sections(&run("longbench", "qasper", &[vanilla, ["a3", "full"]]));
    assert!(titled(&sections, "LongBench: tiny").is_some() && titled(&sections, "longbench: tiny").is_none());
}

#[test]
fn right_answers_that_are_kept_are_counted() {
    // Vanilla's third answer is not wholly right, and one right answer is lost.
    let scores = [("vanilla", [1.0, 1.0, 0.5, 1.0]), ("a3", [1.0, 0.0, 1.0, 1.0])];
    let records: Vec<Record> = scores
        .iter()
        .flat_map(|(method, scores)| {
            let one = |(sample, score)| scored("rag", "x", [method, "full"], sample, &[("score", score)]);
            scores.iter().copied().enumerate().map(one).collect::<Vec<_>>()
        })
        .collect();
    let sections = all_sections(&records);
    let kept = cell(titled(&sections, "All tasks: tiny").unwrap(), "A3", "Right answers");
    assert_eq!((kept.value.as_str(), kept.note.as_str()), ("66.7 %", "2 of 3"));
}

#[test]
fn few_samples_decide_nothing() {
    let (about, records) = run();
    let first: Vec<Record> = records.into_iter().filter(|record| record.sample == "0").collect();
    let sections = sections(&data::Data::new(&about, &first));
    let claims = titled(&sections, "Statements").unwrap();
    assert!(claims.rows.iter().all(|row| row.cells[2].value == "too few samples"));
    let (about, all) = run();
    assert!(fusion_advice(&sections).is_none());
    assert!(fusion_advice(&super::sections(&data::Data::new(&about, &all))).is_some());
    // Three samples of which one is 0: an interval that reaches 0 is no news.
    let few = |scores: &[f64]| -> Vec<Record> {
        let one = |(sample, score): (usize, &f64)| {
            scored("longbench", "qasper", ["vanilla", "full"], sample, &[("score", *score)])
        };
        scores.iter().enumerate().map(one).collect()
    };
    for (scores, uninformative) in
        [(&[0.0, 0.0, 1.0][..], false), (&[0.0; 3], true), (&[0.0, 0.0, 0.1], true)]
    {
        let records = few(scores);
        let about = RunInfo::default();
        assert_eq!(
            data::Data::new(&about, &records).uninformative(0, 0).is_some(),
            uninformative,
            "{scores:?}"
        );
    }
}

/// Tasks on which vanilla is unlucky count, or all others would look worse than they are.
#[test]
fn equal_totals_are_an_equal_score() {
    let mut records = Vec::new();
    for task in 0..12 {
        for sample in 0..2 {
            let score = |lucky: bool| [("score", if lucky { 1.0 } else { 0.0 })];
            let one =
                |method, scores: &[_]| scored("rag", &format!("t{task}"), [method, "full"], sample, scores);
            // Each is right on two of three tasks, and not on the same ones.
            records.push(one("vanilla", &score(task % 3 != 0 && sample == 0)));
            records.push(one("a3", &score(task % 3 != 1 && sample == 0)));
        }
    }
    let sections = all_sections(&records);
    let share = cell(titled(&sections, "All tasks: tiny").unwrap(), "A3", "Score");
    assert_eq!(share.value, "100.0 %");
}

#[test]
fn advice_is_by_samples_that_all_answered_and_failures_are_told() {
    let mut records = Vec::new();
    for sample in 0..20 {
        let hard = sample % 2 == 1;
        // The better method answers all; the other fails on the hard samples, on which all are far from vanilla.
        for (method, kl) in [("vanilla", 0.0), ("a3", 0.1), ("pie", 0.2)] {
            let mut record = scored("rag", "x", [method, "full"], sample, &[("score", 0.0)]);
            record.fidelity = Some(Fidelity { kl: if hard { 10.0 * kl } else { kl }, ..Fidelity::default() });
            if hard && method == "pie" {
                (record.error, record.cost) = (Some("no".to_owned()), None);
            }
            records.push(record);
        }
    }
    let sections = all_sections(&records);
    let advice = fusion_advice(&sections).unwrap();
    assert!(advice.contains("by KL A3") && advice.contains("(0.100 nats; 10 samples)"), "{advice}");
    let summary = titled(&sections, "All tasks: tiny").unwrap();
    let failed = ["A3", "PIE"].map(|method| cell(summary, method, "Failed").value.as_str());
    assert_eq!(failed, ["0 of 20", "10 of 20"]);
}

#[test]
fn scores_tell_how_many_answers_have_them_and_by_which_lengths() {
    let mut records: Vec<Record> = (0..10)
        .map(|sample| scored("longwriter", "en", ["vanilla", "full"], sample, &[("score", 0.5)]))
        .collect();
    for record in &mut records[..2] {
        record.scores.insert("quality".to_owned(), 1.0);
    }
    records[9].answer_room = Some(40);
    let sections = all_sections(&records);
    let table = titled(&sections, "longwriter: tiny").unwrap();
    let quality = cell(table, "Vanilla", "en S_q");
    assert_eq!((quality.value.as_str(), quality.note.as_str()), ("100.00", "2 of 10 answers"));
    assert_eq!(cell(table, "Vanilla", "en overall").value, "75.00");
    assert!(
        table
            .notes
            .iter()
            .any(|note| note.contains("room for 40 new tokens") && note.contains("0 of 1 answers"))
    );

    let record = |(sample, (words, score)): (usize, (usize, f64))| {
        let record = scored("longbench", "qasper_e", ["vanilla", "full"], sample, &[("score", score)]);
        Record { context_words: Some(words), ..record }
    };
    let lengths = [(10, 1.0), (3999, 0.5), (4000, 0.25), (8000, 0.0), (90_000, 0.5)];
    let records: Vec<Record> = lengths.into_iter().enumerate().map(record).collect();
    let sections = all_sections(&records);
    let table = titled(&sections, "longbench: tiny").unwrap();
    let of = |length: &str| {
        let cell = cell(table, "Vanilla", &format!("qasper_e {length}"));
        (cell.value.as_str(), cell.note.as_str())
    };
    assert_eq!((of("0-4k"), of("4-8k")), (("75.00", "2 samples"), ("25.00", "1 sample")));
    assert_eq!((table.columns.len(), of("8k+")), (4, ("25.00", "2 samples")));
    let csv = report(&RunInfo::default(), &records).csv;
    assert!(csv.contains(",score 0-4k,75,") && csv.contains(",score 8k+,25,"), "{csv}");
}

#[test]
fn long_outputs_are_compared_as_their_papers_do() {
    let checks = |prefix: &str, yes: f64| -> Vec<(String, f64)> {
        let of = |kind: &str| [(format!("{prefix}{kind}_yes"), yes), (format!("{prefix}{kind}_asked"), 4.0)];
        let mut scores: Vec<_> = ["once", "range", "periodic"].iter().flat_map(|kind| of(kind)).collect();
        scores.extend([(format!("{prefix}checks"), 12.0), ("score".to_owned(), 1.0 - yes / 8.0)]);
        scores
    };
    let run = |prefix: &str| -> Vec<Record> {
        let variants = [
            ("full", 2.0),
            ("h2o:capacity=64", 1.0),
            ("h2o:capacity=128", 4.0),
            ("morph_kv:capacity=64", 3.0),
        ];
        let one = |(policy, yes): (&str, f64), sample| {
            let scores = checks(prefix, yes);
            let scores: Vec<(&str, f64)> = scores.iter().map(|(name, score)| (&name[..], *score)).collect();
            scored("longgenbench", "short", ["vanilla", policy], sample, &scores)
        };
        variants.into_iter().flat_map(|variant| (0..9).map(move |sample| one(variant, sample))).collect()
    };
    let sections = all_sections(&run(""));
    let titles: Vec<&str> =
        titled(&sections, "LongGenBench: tiny").unwrap().columns.iter().map(|c| c.title.as_str()).collect();
    assert_eq!(titles[..2], ["short average", "short completion rate"]);
    let claims = titled(&sections, "Statements").unwrap();
    assert_eq!(verdict(claims, "MorphKV is better than H2O", "average"), Some("agrees"));
    let row = claims.rows.iter().find(|row| row.group.starts_with("MorphKV is better than H2O")).unwrap();
    assert_eq!(row.cells[0].value, "MorphKV (capacity=64), H2O (capacity=64)", "not the capacity of another");
    assert_eq!(row.cells[3].value, "50.00");
    let sections = all_sections(&run("proxy_"));
    assert!(titled(&sections, "Statements").is_none(), "a proxy is not the paper's score");
}

#[test]
fn averages_are_of_the_papers_own_sets() {
    let mut records = Vec::new();
    for (task, score) in [("qasper", 0.25), ("hotpotqa_e", 0.75), ("hotpotqa", 1.0)] {
        for (method, policy, times) in [("vanilla", "full", 1.0), ("a3", "full", 0.5), ("a3", "a3_ex", 0.5)] {
            let own =
                |sample| scored("longbench", task, [method, policy], sample, &[("score", score * times)]);
            records.extend((0..9).map(own));
        }
    }
    records.pop();
    let sections = all_sections(&records);
    let table = titled(&sections, "LongBench: tiny").unwrap();
    assert_eq!(cell(table, "Vanilla", "Avg").value, "50.00");
    assert!(table.notes.iter().any(|note| note.contains("not the paper's: hotpotqa.")));
    assert!(table.notes.iter().any(|note| note.starts_with("Rows have different numbers of samples")));
    assert_eq!(table.rows[2].label, "A3 + A3-ex");
    assert!(table.rows.iter().all(|row| row.group.is_empty()), "the paper has it");
}

#[test]
fn samples_of_a_task_are_of_all_depths() {
    let (about, records) = run();
    let about = RunInfo {
        tasks: about.tasks.into_iter().map(|task| TaskInfo { samples: 2, ..task }).collect(),
        ..about
    };
    let sections = sections(&data::Data::new(&about, &records));
    let needle = titled(&sections, "needle: tiny").unwrap();
    assert!(needle.rows[0].cells.iter().all(|cell| cell.note.is_empty()));
    let mut deep = scored("ruler", "vt", ["vanilla", "full"], 0, &[("score", 1.0)]);
    deep.depth = Some(25.0);
    let csv = report(&RunInfo::default(), &[deep]).csv;
    assert_eq!(csv.matches("vanilla,full,score,").count(), 1, "{csv}");
}

#[test]
fn the_run_has_its_settings_and_tasks() {
    let (mut about, records) = run();
    about.settings.insert("tokens of a chunk".to_owned(), "512".to_owned());
    about.tasks[0].data = Some("0123456789abcdef".to_owned());
    let sections = sections(&data::Data::new(&about, &records));
    assert_eq!(
        titled(&sections, "The run").unwrap().rows.last().unwrap().cells[0].value,
        "tokens of a chunk: 512"
    );
    let row = &titled(&sections, "Tasks").unwrap().rows[0];
    let cells: Vec<&str> = row.cells.iter().map(|cell| cell.value.as_str()).collect();
    assert_eq!(
        (row.label.as_str(), cells),
        ("longbench/hotpotqa", vec!["", "6 of 200", "hotpotqa is a <b>subset</b>", "0123456789ab"])
    );
}

#[test]
fn prefixes_of_two_texts_are_two_variants() {
    let prefixes = ["a3:prefix=text:/m/a.txt", "a3:prefix=text:/m/b.txt"];
    let mut records = Vec::new();
    for (method, score) in [("vanilla", 1.0), (prefixes[0], 0.5), (prefixes[1], 0.25)] {
        let one = |sample| scored("rag", "x", [method, "full"], sample, &[("score", score)]);
        records.extend((0..9).map(one));
    }
    let sections = all_sections(&records);
    let summary = titled(&sections, "All tasks: tiny").unwrap();
    let scores = ["a", "b"]
        .map(|text| cell(summary, &format!("A3 (prefix=text:/m/{text}.txt)"), "Score, share").value.as_str());
    assert_eq!(scores, ["50.0 %", "25.0 %"]);
}

#[test]
fn advice_without_a_time_says_so() {
    let mut records = Vec::new();
    for sample in 0..10 {
        for method in ["vanilla", "a3", "pie"] {
            let score = if method == "pie" { 0.1 } else { 0.5 + 0.01 * sample as f64 };
            records.push(scored("rag", "x", [method, "full"], sample, &[("score", score)]));
        }
    }
    let untimed = records.iter_mut().filter(|record| record.method == "a3");
    untimed.for_each(|record| record.cost.as_mut().unwrap().prefilled_chunks = 1);
    let sections = all_sections(&records);
    let advice = fusion_advice(&sections).unwrap();
    assert!(advice.contains("A3 has the best score") && advice.contains("no time was measured"), "{advice}");
    records.retain(|record| record.method != "a3");
    let sections = all_sections(&records);
    let advice = fusion_advice(&sections).unwrap();
    assert!(advice.contains("all score below Vanilla by more than chance"), "{advice}");
}

#[test]
fn a_model_with_fewer_samples_than_another_is_not_stopped_early() {
    let (mut about, mut records) = run();
    about.tasks.retain(|task| task.task == "hotpotqa");
    records.retain(|record| {
        record.task == "hotpotqa" && (record.model == MODELS[0] || record.sample.as_str() < "4")
    });
    let notes = |about: &RunInfo| {
        let sections = sections(&data::Data::new(about, &records));
        titled(&sections, &format!("LongBench: {}", MODELS[1])).unwrap().notes.concat()
    };
    assert!(notes(&about).contains("stopped early: 6 samples"), "{}", notes(&about));
    about.tasks[0].model_samples = [(MODELS[0].to_owned(), SAMPLES), (MODELS[1].to_owned(), 4)].into();
    assert!(!notes(&about).contains("stopped early"), "{}", notes(&about));
}

#[test]
fn a_method_of_another_machine_is_set_against_vanillas_time_there() {
    let mut records = Vec::new();
    for sample in 0..9 {
        let vanilla = scored("rag", "x", ["vanilla", "full"], sample, &[("score", 0.5)]);
        let mut slow = scored("rag", "x", ["a3", "full"], sample, &[("score", 0.5)]);
        let cost = slow.cost.as_mut().unwrap();
        cost.ttft = 10.0;
        cost.vanilla = Some(VanillaCost { ttft: 40.0, ..VanillaCost::default() });
        records.extend([vanilla, slow]);
    }
    let sections = all_sections(&records);
    let speed_up = cell(titled(&sections, "All tasks: tiny").unwrap(), "A3", "TTFT");
    assert_eq!(speed_up.value, "4.00×");
}
