//! Whole simulations, and the command line.

use clap::{CommandFactory, FromArgMatches, Parser};

use crate::scenario::{Case, Rule, Scenario};
use crate::simulation::Simulation;
use crate::statistics::Summary;
use crate::traffic::Corpus;
use crate::{Cli, defaults, presets};

/// A scenario of options, of which a later one goes before an earlier one.
pub(crate) fn scenario(options: &[&str]) -> Scenario {
    let command = Cli::command().args_override_self(true);
    let matches = command.try_get_matches_from([&["refrain-sim"], options].concat()).unwrap();
    let scenario = Cli::from_arg_matches(&matches).unwrap().scenario;
    scenario.validate().unwrap();
    scenario
}

fn summary(scenario: &Scenario, rule: Rule) -> Summary {
    let case = Case { rule, ..scenario.cases(scenario.workers[0]).next().unwrap() };
    let corpus = Corpus::new(scenario, case.workers);
    let (statistics, _) = Simulation::new(scenario, &case, &corpus).unwrap().run(&mut |_| {}).unwrap();
    statistics.summary(scenario.chunk_bytes())
}

/// One worker whose requests all take the same time is a queue M/D/1, of which Pollaczek and Khinchine's formula tells the mean wait.
#[test]
fn a_worker_alone_is_the_queue_of_the_books() {
    for (load, overlap) in [(0.3, "true"), (0.7, "false"), (0.85, "true")] {
        // Five chunks in memory, which are read while others compute: 0.1 s to compute.
        let rate = format!("--rate={}", load / 0.1);
        let scenario = scenario(&[
            "--workers=1",
            "--corpus=5",
            "--chunks=5",
            "--charge=0",
            "--question=300",
            "--requests=120000",
            "--warmup=0.1",
            &rate,
            &format!("--overlap={overlap}"),
        ]);
        let summary = summary(&scenario, Rule::Cost);
        let expected = 0.1 + load * 0.1 / (2.0 * (1.0 - load));
        assert!((summary.ttft_mean / expected - 1.0).abs() < 0.04, "{} s, not {expected}", summary.ttft_mean);
        assert!((summary.utilisation / load - 1.0).abs() < 0.02, "{} busy, not {load}", summary.utilisation);
        assert_eq!((summary.memory_share, summary.gets, summary.busiest), (1.0, 0.0, 1.0));
    }
}

/// Two workers with one queue each, of which the emptier one is chosen, wait less than two that are chosen by chance.
#[test]
fn rules_differ_in_what_they_are_for() {
    let scenario = scenario(&[
        "--workers=8",
        "--corpus=2000",
        "--requests=1500",
        "--rate=2.5/worker",
        "--memory=50",
        "--disk=400",
        "--popularity=two-level",
    ]);
    let [random, least, prefix, tessera, cost] =
        [Rule::Random, Rule::LeastLoaded, Rule::Prefix, Rule::Tessera, Rule::Cost]
            .map(|rule| summary(&scenario, rule));
    let local = |summary: &Summary| summary.memory_share + summary.disk_share;
    assert!(random.ttft_p99 > 1.5 * least.ttft_p99, "{} {}", random.ttft_p99, least.ttft_p99);
    assert!(least.ttft_p99 > cost.ttft_p99, "{} {}", least.ttft_p99, cost.ttft_p99);
    assert!(local(&least) < local(&prefix), "{} {}", local(&least), local(&prefix));
    assert!(local(&prefix) < local(&cost), "{} {}", local(&prefix), local(&cost));
    assert!(local(&cost) < local(&tessera), "{} {}", local(&cost), local(&tessera));
}

#[test]
fn a_seed_determines_a_simulation() {
    let run = |seed: &str, gateways: &str| {
        let scenario = scenario(&[
            "--workers=5",
            "--requests=300",
            "--corpus=500",
            "--seed",
            seed,
            "--gateways",
            gateways,
        ]);
        [Rule::Random, Rule::Prefix, Rule::Cost].map(|rule| summary(&scenario, rule))
    };
    assert_eq!(run("1", "3"), run("1", "3"));
    assert_ne!(run("1", "3"), run("2", "3"));
}

/// An index that learns nothing until the end chooses as if nobody held anything.
#[test]
fn a_late_index_costs_local_reads() {
    let local = |delay: &str| {
        let scenario = scenario(&[
            "--workers=8",
            "--requests=400",
            "--corpus=1000",
            "--popularity=two-level",
            "--delay",
            delay,
            "--memory=20",
            "--disk=200",
        ]);
        let summary = summary(&scenario, Rule::Tessera);
        summary.memory_share + summary.disk_share
    };
    let (prompt, late, never) = (local("0"), local("30"), local("1000000"));
    assert!(prompt > late + 0.03 && late > never + 0.03, "{prompt} {late} {never}");
}

/// With several gateways, states at every change keep the tail that states of a second ago lose.
#[test]
fn several_gateways_need_prompt_states() {
    let p99 = |gateways: &str, report: &str| {
        let scenario = scenario(&[
            "--workers=20",
            "--requests=600",
            "--rate=2.5/worker",
            "--gateways",
            gateways,
            "--report",
            report,
            "--own=true",
        ]);
        summary(&scenario, Rule::LeastLoaded).ttft_p99
    };
    let (alone, prompt, late) = (p99("1", "1"), p99("4", "0"), p99("4", "1"));
    assert!(prompt < 1.1 * alone && late > 1.5 * prompt, "{alone} {prompt} {late}");
}

/// Reports of real workers do not tell gateways apart.
#[test]
fn gateways_know_no_more_than_real_ones() {
    let late = |more: &[&str]| {
        let options = ["--workers=10", "--requests=300", "--corpus=500", "--delay=10"];
        summary(&scenario(&[&options, more].concat()), Rule::Cost)
    };
    assert_eq!(late(&[]), late(&["--own=false"]));
    assert_ne!(late(&[]), late(&["--own=true"]));
}

#[test]
fn presets_are_scenarios() {
    for line in presets::list().lines() {
        let (name, about) = line.split_once("  ").unwrap();
        assert!(!about.trim().is_empty(), "{name}");
        let scenario = with_values(name, &[]).unwrap();
        scenario.validate().unwrap();
        // What --show prints is the same scenario.
        let folder = std::env::temp_dir().join(format!("refrain-sim-{}-{name}.toml", std::process::id()));
        let shown = toml::to_string(&scenario).unwrap();
        std::fs::write(&folder, &shown).unwrap();
        let read = with_values(folder.to_str().unwrap(), &[]).unwrap();
        std::fs::remove_file(&folder).unwrap();
        assert_eq!(toml::to_string(&read).unwrap(), shown);
    }
}

fn with_values(name: &str, options: &[&str]) -> anyhow::Result<Scenario> {
    let command = defaults::with_values(Cli::command(), &presets::read(name)?)?;
    let matches = command.try_get_matches_from([&["refrain-sim"], options].concat())?;
    Ok(Cli::from_arg_matches(&matches)?.scenario)
}

#[test]
fn options_go_before_a_file_and_a_file_before_its_base() {
    let path = std::env::temp_dir().join(format!("refrain-sim-{}-base.toml", std::process::id()));
    let name = path.to_str().unwrap();
    let read = |text: &str, options: &[&str]| {
        std::fs::write(&path, text).unwrap();
        let read = with_values(name, options);
        std::fs::remove_file(&path).unwrap();
        read
    };
    let scenario =
        read("base = \"8b-a3\"\nremote_rate = 3\ndisk = 7\nworkers = [2, 3]", &["--disk=9"]).unwrap();
    assert_eq!((scenario.prefill, scenario.remote_rate, scenario.disk), (20480.0, 3.0, 9));
    assert_eq!(scenario.workers, [2, 3]);
    for list in ["workers", "rate", "rules", "delay"] {
        let error = read(&format!("{list} = []"), &[]).unwrap().validate().unwrap_err().to_string();
        assert!(error.contains(list) && error.contains("one at least"), "{error}");
    }
    let error = |text: &str| format!("{:#}", read(text, &[]).unwrap_err());
    for (text, words) in [
        ("colour = 1", "unknown key 'colour'"),
        ("json = true", "unknown key 'json'"),
        ("prefill = \"quick\"", "key 'prefill' has a wrong value"),
        ("rate = [1, { a = 2 }]", "key 'rate' has a wrong value"),
        ("base = \"9b\"", "base has to be one of small-fleet"),
        ("base = 8", "base has to be one of small-fleet"),
        ("a = = 1", "not valid TOML"),
    ] {
        let error = error(text);
        assert!(error.contains(words) && error.contains(name), "{error}");
    }
    let error = format!("{:#}", presets::read("9b").unwrap_err());
    assert!(
        error.contains("9b is neither a preset (small-fleet, ") && error.contains("nor a file"),
        "{error}"
    );
}

#[test]
fn values_that_make_no_sense_are_told() {
    for (option, words) in [
        ("--workers=0", "--workers"),
        ("--workers=65537", "--workers"),
        ("--corpus=3", "5 different ones"),
        ("--corpus=2000000/worker", "--corpus: at most"),
        ("--gateways=0", "--gateways"),
        ("--requests=0", "--requests"),
        ("--memory=4", "--memory"),
        ("--warmup=1", "--warmup"),
        ("--hot=0", "--few, --hot"),
        ("--charge=-1", "--charge"),
        ("--prefill=0", "--prefill"),
        ("--disk-rate=inf", "--disk-rate"),
        ("--remote-latency=-1", "--remote-latency"),
        ("--delay=NaN", "--delay"),
        ("--jitter=1", "--jitter"),
    ] {
        let scenario = Cli::try_parse_from(["refrain-sim", option]).unwrap().scenario;
        let error = scenario.validate().unwrap_err().to_string();
        assert!(error.contains(words), "{option}: {error}");
    }
    for option in ["--rate=fast", "--rate=0", "--corpus=-1/worker", "--rules=best", "--markdown=yes"] {
        assert!(Cli::try_parse_from(["refrain-sim", option]).is_err(), "{option}");
    }
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}
