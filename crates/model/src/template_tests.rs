use std::time::{Duration, UNIX_EPOCH};

use super::{ChatTemplate, Layout, Message, PromptParts, date};

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const LLAMA3: &str = "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}";
const MISTRAL: &str = "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}";
const PHI3: &str = "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% else %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{{ '<|assistant|>\n' }}";

fn layout() -> Layout {
    Layout {
        system: Some("Be brief.".to_owned()),
        before_documents: "Documents:\n".to_owned(),
        question: "Why {{ this }}?".to_owned(),
        history: Vec::new(),
    }
}

fn text(parts: &PromptParts) -> String {
    let join = |pieces: &[super::Piece]| pieces.iter().map(|piece| piece.text.as_str()).collect::<String>();
    format!("{}§{}", join(&parts.system), join(&parts.question))
}

fn split(source: &str, layout: &Layout) -> PromptParts {
    ChatTemplate::new(source, "<s>", "</s>").unwrap().split(layout).unwrap()
}

#[test]
fn a_prompt_is_split_where_its_documents_stand() {
    assert_eq!(
        text(&split(CHATML, &layout())),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nDocuments:\n§Why {{ this }}?<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        text(&split(LLAMA3, &layout())),
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nDocuments:\n§Why {{ this }}?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(
        text(&split(PHI3, &layout())),
        "<|system|>\nBe brief.<|end|>\n<|user|>\nDocuments:\n§Why {{ this }}?<|end|>\n<|assistant|>\n"
    );
    let parts = split(CHATML, &layout());
    let user: Vec<&str> =
        parts.system.iter().filter(|piece| !piece.literal).map(|p| p.text.as_str()).collect();
    assert_eq!(
        user,
        ["Be brief.", "Documents:\n"],
        "what people wrote is never read as the template's own text"
    );
}

#[test]
fn a_template_that_refuses_a_system_message_gets_it_in_the_users_turn() {
    let parts = split(MISTRAL, &layout());
    assert_eq!(text(&parts), "<s>[INST] Be brief.\n\nDocuments:\n§Why {{ this }}? [/INST]");
}

#[test]
fn earlier_turns_stand_before_the_documents() {
    let turn = |role: &str, content: &str| Message { role: role.to_owned(), content: content.to_owned() };
    let history = vec![turn("user", "One? \u{F8F0}d\u{F8F1}"), turn("assistant", "Two.")];
    let parts = split(MISTRAL, &Layout { history, system: None, ..layout() });
    assert_eq!(
        text(&parts),
        "<s>[INST] One? \u{F8F0}d\u{F8F1} [/INST]Two.</s>[INST] Documents:\n§Why {{ this }}? [/INST]",
        "placeholders written by a user are text"
    );
}

#[test]
fn templates_that_cannot_be_used_are_errors() {
    let error = |source: &str| {
        let split = ChatTemplate::new(source, "", "").and_then(|template| template.split(&layout()));
        split.unwrap_err().to_string()
    };
    assert!(error("{% for %}").contains("template"));
    assert!(error("fixed text").contains("once"));
    assert!(error("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}").contains("once"));
    assert!(error("{{ raise_exception('no users here') }}").contains("no users here"));
    assert!(error("\u{F8F0}").contains("U+F8F0"));
    assert!(
        error("{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}")
            .contains("fuel")
    );
}

#[test]
fn dates_are_civil() {
    let at = |days: u64| {
        date("%d %b %Y|%d %B|%m-%H:%M:%S", UNIX_EPOCH + Duration::from_secs(days * 86_400 + 3661))
    };
    assert_eq!(at(0), "01 Jan 1970|01 January|01-01:01:01");
    assert_eq!(at(19_782), "29 Feb 2024|29 February|02-01:01:01");
    assert_eq!(at(20_453), "31 Dec 2025|31 December|12-01:01:01");
}
