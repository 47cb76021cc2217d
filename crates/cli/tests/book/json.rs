//! The fields that the page of JSON names are those that commands print.

use std::collections::BTreeSet;

use super::*;

#[test]
fn the_page_of_json_names_the_fields_that_commands_print() {
    if !real_model() {
        return;
    }
    let home = home_with_documents();
    let docs = home.path("docs");
    let docs = docs.to_str().unwrap();
    let ingested = home.json(&["ingest", docs]);
    let compare = [
        "ask",
        "--docs",
        docs,
        "--max-tokens",
        "2",
        "--compare-tokens",
        "2",
        "--compare",
        "vanilla;pie",
        "Why?",
    ];
    let asked = home.json(&compare);
    let length = ["bench", "ttft", "--lengths", "100", "--methods", "pie", "--runs", "1"];
    let printed = [
        ("`refrain models`, of each", home.json(&["models"])[0].clone()),
        ("`refrain ingest`", ingested),
        ("`refrain ask`, each of `answers`", asked["answers"][0].clone()),
        ("`refrain ask`, each of `comparison`", asked["comparison"][0].clone()),
        ("`refrain ask`, `ingest`", asked["ingest"].clone()),
        ("`refrain ask`", asked),
        ("`refrain generate`", home.json(&["generate", "--max-tokens", "2", "Why?"])),
        (
            "`refrain documents ls`, each of `documents`",
            home.json(&["documents", "ls"])["documents"][0].clone(),
        ),
        ("`refrain store stats`", home.json(&["store", "stats"])),
        ("`refrain store ls`", home.json(&["store", "ls"])),
        ("`refrain methods`, of each", home.json(&["methods"])[0].clone()),
        ("`refrain bench ttft`", home.json(&length)),
        ("`refrain documents rm`", home.json(&["documents", "rm", "--all", "--yes"])),
    ];
    let page = std::fs::read_to_string(root().join("docs/book/src/json.md")).unwrap();
    for (what, value) in printed {
        let start = format!("| {what} | ");
        let row = page.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_else(|| panic!("{what}"));
        let told: BTreeSet<&str> =
            row.split('`').filter(|field| !field.trim_matches([' ', '|']).is_empty()).collect();
        let fields: BTreeSet<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(told, fields, "{what}");
    }
}
