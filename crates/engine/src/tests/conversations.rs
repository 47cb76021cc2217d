//! Prompts of conversations.

use std::path::Path;

use refrain_fusion::METHODS;
use refrain_kernels::{Dtype, Precision};
use refrain_model::{ChatTemplate, Decoder, Message, ModelFiles, Tokenizer, ToolCall};
use refrain_store::Store;
use serde_json::json;

use super::{device, engine, exact, tiny, tiny_engine};
use crate::{Document, Engine, Error, GenerateRequest, Instructions, Prompt, Sampling};

/// Phi-4-mini's way, as far as tools go: calls stand beside tools, which are a field of the system message.
const PHI4: &str = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}{{ '<|tool|>' + m['tools'] + '<|/tool|>' }}{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

/// The tiny Llama with another chat template, and the tokenizer of a folder.
pub(super) fn with_template(tokenizer: &Path, source: &str) -> Engine {
    let files = ModelFiles::open(tiny("llama")).unwrap();
    let decoder = Decoder::load(files, &device(), Precision::F32, None, |_, _| ()).unwrap();
    let (tokenizer, template) =
        (Tokenizer::from_folder(tokenizer).unwrap(), ChatTemplate::new(source, None, None));
    let store = Store::in_memory(1 << 30);
    Engine::new(decoder, tokenizer, Some(template.unwrap()), store, exact(Dtype::F32), [0; 32]).unwrap()
}

fn said(role: &str, text: &str) -> Message {
    Message::text(role, text)
}

/// The text of a conversation's prompt.
fn written(engine: &Engine, turns: &[Message], around: &Instructions) -> String {
    let prompt = engine.prompt_of_turns(Vec::new(), turns, around).unwrap();
    engine.tokenizer().decode(&prompt.ids(), false)
}

/// A conversation that has called tools goes on without them, also where the template writes calls beside tools only.
#[test]
fn a_conversation_goes_on_without_the_tools_that_it_has_called() {
    let engine = with_template(&tiny("llama"), PHI4);
    let call =
        ToolCall { id: "1".to_owned(), name: "torque".to_owned(), arguments: json!({ "bolt": "stem" }) };
    let turns = [
        said("user", "How tight?"),
        Message { tool_calls: vec![call], ..said("assistant", "") },
        Message { tool_call_id: Some("1".to_owned()), ..said("tool", "5 Nm") },
        said("assistant", "Five."),
        said("user", "Why?"),
    ];
    let text = written(&engine, &turns, &Instructions::default());
    let wanted = "<|user|>How tight?<|end|><|assistant|><tool_call>\n{\"name\": \"torque\", \"arguments\": {\"bolt\": \"stem\"}}\n</tool_call>\
                  <|end|><|user|><tool_response>\n5 Nm\n</tool_response><|end|><|assistant|>Five.<|end|><|user|>Why?<|end|><|assistant|>";
    assert!(text.ends_with(wanted), "{text}");
    let tool = json!({ "type": "function", "function": { "name": "torque", "parameters": { "type": "object", "properties": {} } } });
    let with_tools = written(&engine, &turns, &Instructions { tools: vec![tool], ..Instructions::default() });
    assert!(with_tools.contains("<|assistant|><|tool_call|>[{\"name\": \"torque\""), "{with_tools}");
}

/// A last turn of the assistant is finished, and a new one begins behind it.
#[test]
fn a_conversation_goes_on_from_a_turn_of_the_assistant() {
    let turns = [said("user", "How tight?"), said("assistant", "Five.")];
    let text = written(&engine(&tiny("llama"), exact(Dtype::F32)), &turns, &Instructions::default());
    let wanted = "<|im_start|>user\nHow tight?<|im_end|>\n<|im_start|>assistant\nFive.<|im_end|>\n<|im_start|>assistant\n";
    assert!(text.ends_with(wanted), "{text}");
    let text = written(&tiny_engine("llama", exact(Dtype::F32)), &turns, &Instructions::default());
    assert!(text.ends_with("How tight?\nAnswer:Five.\nAnswer:"), "{text}");
}

/// A prompt of Qwen3 without thoughts ends with empty ones, which its template leaves out of history. A further turn, and the step of an
/// agent, go on from the repair of the first one's documents up to there.
#[test]
fn a_conversation_goes_on_from_reused_documents_up_to_what_history_omits() {
    let template = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tools/qwen3.jinja");
    let template = std::fs::read_to_string(template).unwrap();
    let plain = with_template(&tiny("llama"), &template);
    let document = |title: &str, text: &str| Document { title: title.to_owned(), text: text.repeat(3) };
    let documents =
        [document("Torque", "A stem bolt takes 5 Nm. "), document("Wheels", "The rear one has 28 spokes. ")];
    let chunks = plain.chunks(&documents).unwrap();
    let around = Instructions {
        before_documents: String::new(),
        before_question: "Question: ".to_owned(),
        ..Instructions::default()
    };
    let prompt = |turns: &[Message]| plain.prompt_of_turns(chunks.clone(), turns, &around).unwrap();
    let asked = said("user", "How tight is a stem bolt?");
    let call =
        ToolCall { id: "1".to_owned(), name: "torque".to_owned(), arguments: json!({ "bolt": "stem" }) };
    let called = Message { tool_calls: vec![call], ..said("assistant", "") };
    let result = Message { tool_call_id: Some("1".to_owned()), ..said("tool", "5 Nm") };
    let first = prompt(std::slice::from_ref(&asked));
    let step = prompt(&[asked.clone(), called.clone(), result.clone()]);
    let last = prompt(&[asked.clone(), called, result, said("assistant", "Five."), said("user", "Why?")]);
    let turn = prompt(&[asked.clone(), said("assistant", "Five."), said("user", "Why?")]);
    let thinks = Instructions { thinking: true, ..around.clone() };
    let thinking = plain.prompt_of_turns(chunks.clone(), std::slice::from_ref(&asked), &thinks).unwrap();
    let longer = prompt(&[said("user", "How tight is a stem bolt? And the seat?")]);
    let common = |a: &Prompt, b: &Prompt| {
        let common = a.ids().iter().zip(b.ids()).take_while(|(a, b)| **a == *b).count();
        assert!(common < a.len() && common > a.len() - a.question.len() + 16);
        // The last token is always computed.
        common.min(b.len() - 1) / 16 * 16
    };
    for method in ["pie", "cache_blend", "a3", "drift:charge=0.3"] {
        let taken = |engine: &Engine, prompt: &Prompt| {
            let sampling = Sampling { max_tokens: 4, ..Sampling::default() };
            let request = GenerateRequest::new(METHODS.parse(method).unwrap(), sampling);
            engine.answer(prompt, &request, |_| true).unwrap().stats.prefix_tokens
        };
        let engine = plain.with_prefix_cache(1 << 26);
        assert_eq!(taken(&engine, &first), 0, "{method}");
        for next in [&step, &turn, &thinking] {
            assert_eq!(taken(&engine, next), common(&first, next), "{method}");
        }
        assert_eq!(taken(&engine, &last), common(&step, &last), "{method}");
        assert_eq!(taken(&engine, &longer), 0, "{method}: another question");
        // A conversation that is first seen at a later step.
        let engine = plain.with_prefix_cache(1 << 26);
        assert_eq!(taken(&engine, &step), 0, "{method}");
        assert_eq!(taken(&engine, &last), common(&step, &last), "{method}");
    }
}

/// A turn of the user may be empty, unless all is.
#[test]
fn a_turn_of_the_user_may_be_empty_beside_others() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let system = |text: &str| Instructions { system: Some(text.to_owned()), ..Instructions::default() };
    let turns = [said("user", "How tight?"), said("assistant", "Five."), said("user", " ")];
    let text = written(&engine, &turns, &Instructions::default());
    assert!(
        text.ends_with("Five.<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
        "{text}"
    );
    let text = written(&engine, &turns[2..], &system("Greet me."));
    assert!(text.contains("Greet me.<|im_end|>\n<|im_start|>user\n<|im_end|>"), "{text}");
    for around in [system(" "), Instructions::default()] {
        let refused = engine.prompt_of_turns(Vec::new(), &turns[2..], &around);
        assert!(matches!(refused, Err(Error::EmptyQuestion)));
    }
    let refused = engine.prompt_of_turns(Vec::new(), &turns[1..2], &Instructions::default());
    assert!(matches!(refused, Err(Error::EmptyQuestion)), "no turn is the user's");
    assert!(matches!(engine.prompt(&[], " ", &system("Greet me.")), Err(Error::EmptyQuestion)));
}
