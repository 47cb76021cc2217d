//! Positions of the needle.

use super::*;
use crate::tasks::testing::{Words, data};

fn sample(length: usize, depth: f64, style: NeedleStyle) -> (Sample, Words) {
    let words = Words::default();
    (Needle::open(None).unwrap().sample(length, depth, &words, style).unwrap(), words)
}

/// Text of the context before and after the needle.
fn around(sample: &Sample) -> (&str, &str) {
    assert_eq!(sample.documents.len(), 1);
    assert_eq!(sample.documents[0].matches(NEEDLE.trim()).count(), 1);
    sample.documents[0].split_once(NEEDLE).unwrap()
}

#[test]
fn the_needle_lies_after_a_full_stop_at_its_depth() {
    for length in [1000, 4000, 9000] {
        for depth in depths(11) {
            let (sample, words) = sample(length, depth, NeedleStyle::KvPapers);
            let (before, after) = around(&sample);
            let count = |text: &str| words.encode(text).unwrap().len();
            let room = length - 200 - count(NEEDLE);
            assert_eq!(count(before) + count(after), room);
            let wanted = (room as f64 * depth / 100.0) as usize;
            match depth {
                0.0 => assert_eq!(before, ""),
                100.0 => assert_eq!(after, ""),
                // No sentence of the essay is longer than 60 words.
                _ => {
                    assert!(before.ends_with('.'), "{depth}: {before}");
                    assert!((wanted - 60..=wanted).contains(&count(before)), "{depth}: {}", count(before));
                }
            }
        }
    }
}

#[test]
fn kvpress_puts_the_needle_at_the_exact_token() {
    for depth in [0.0, 13.0, 50.0, 100.0] {
        let (sample, words) = sample(1000, depth, NeedleStyle::Kvpress);
        let count = |text: &str| words.encode(text).unwrap().len();
        let room = 1000 - 150 - count(NEEDLE);
        let (before, after) = around(&sample);
        assert_eq!(count(before), (room as f64 * depth / 100.0) as usize);
        assert_eq!(count(before) + count(after), room);
    }
}

#[test]
fn each_style_asks_in_its_own_way() {
    let (papers, _) = sample(1000, 50.0, NeedleStyle::default());
    assert!(papers.before.starts_with("This is a very long story book: <book> "));
    assert!(papers.question.ends_with("Question: The best thing to do in San Francisco is: \nAnswer:"));
    assert_eq!((papers.max_tokens, &papers.stop[..]), (30, &["\n".to_string()][..]));
    assert_eq!((papers.length, papers.depth, papers.chat), (Some(1000), Some(50.0), true));
    assert_eq!(papers.gold.answers, [NEEDLE]);
    let (kamradt, _) = sample(1000, 50.0, NeedleStyle::Kamradt);
    assert!(kamradt.question.starts_with("\n\nWhat is the best thing to do in San Francisco? Don't give"));
    assert_eq!((kamradt.max_tokens, kamradt.stop.len()), (300, 0));
    assert_eq!(kamradt.documents, papers.documents);
}

#[test]
fn a_length_without_room_is_refused() {
    let needle = Needle::open(None).unwrap();
    let words = Words::default();
    let room_for_none = 200 + words.encode(NEEDLE).unwrap().len();
    assert!(needle.sample(room_for_none, 50.0, &words, NeedleStyle::KvPapers).is_err());
    let sample = needle.sample(room_for_none + 1, 50.0, &words, NeedleStyle::KvPapers).unwrap();
    assert_eq!(around(&sample).0, "");
}

#[test]
fn a_tokenizer_that_makes_nothing_is_refused() {
    struct Nothing;
    impl TokenText for Nothing {
        fn encode(&self, _: &str) -> Result<Vec<u32>> {
            Ok(Vec::new())
        }
        fn decode(&self, _: &[u32]) -> String {
            String::new()
        }
    }
    assert!(Needle::open(None).unwrap().sample(1000, 50.0, &Nothing, NeedleStyle::KvPapers).is_err());
}

#[test]
fn depths_are_the_originals() {
    assert_eq!(depths(1), [0.0]);
    assert_eq!(depths(10), [0.0, 11.0, 22.0, 33.0, 44.0, 56.0, 67.0, 78.0, 89.0, 100.0]);
}

#[test]
fn texts_are_those_of_the_data() {
    let Some(data) = data("needle").map(|data| data.join("needle")) else { return };
    let config = std::fs::read_to_string(data.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let essays = Needle::open(Some(&data)).unwrap();
    assert_eq!(essays.source(), "essays: Paul Graham");
    let ask = |style| essays.sample(2000, 50.0, &Words::default(), style).unwrap();
    let prompt = |sample: &Sample| format!("{}{{context}}{}", sample.before, sample.question);
    assert_eq!(config["needle"], NEEDLE);
    let papers = &config["kv_compression"];
    let wanted = papers["prompt"].as_str().unwrap().trim_start_matches("<|im_start|> ");
    let wanted = wanted.replace("{retrieval_question}", papers["retrieval_question"].as_str().unwrap());
    let sample = ask(NeedleStyle::KvPapers);
    assert_eq!(prompt(&sample), wanted);
    assert!(around(&sample).0.ends_with('.'));
    let kamradt = &config["kamradt"];
    let question = kamradt["user_2"].as_str().unwrap();
    let question = question.replace("{retrieval_question}", kamradt["retrieval_question"].as_str().unwrap());
    let system = kamradt["system"].as_str().unwrap();
    assert_eq!(prompt(&ask(NeedleStyle::Kamradt)), format!("{system}\n\n{{context}}\n\n{question}"));
    let wrapper = config["kvpress"]["context_wrapper"].as_str().unwrap();
    assert!(prompt(&ask(NeedleStyle::Kvpress)).starts_with(wrapper));
}
