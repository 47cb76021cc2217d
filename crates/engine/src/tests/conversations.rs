//! Prompts of conversations.

use std::path::Path;

use refrain_kernels::{Dtype, Precision};
use refrain_model::{ChatTemplate, Decoder, Message, ModelFiles, Tokenizer, ToolCall};
use refrain_store::Store;
use serde_json::json;

use super::{device, engine, exact, tiny, tiny_engine};
use crate::{Engine, Error, Instructions};

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
