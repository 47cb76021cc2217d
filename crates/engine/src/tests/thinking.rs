//! Answers that follow a grammar behind their thoughts.

use refrain_fusion::Vanilla;
use refrain_model::Thinking;

use super::conversations::with_template;
use super::*;
use crate::sequence::Generator;
use crate::{FinishReason, GenerateRequest, Instructions, Sampling, StructuredOutput};

/// DeepSeek-R1's way: the template begins the thoughts.
const BEGUN: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}";

/// Qwen3's way: the template closes the thoughts unless the model may think.
const OPTIONAL: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}";

/// The end token, and the one that is `<think>` in [`with_mark`].
const END: u32 = 3;
const MARK: u32 = 1;

/// The tiny Llama with a template, and with a token for `<think>`.
fn with_mark(template: &str) -> Engine {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let text = std::fs::read_to_string(tiny("llama").join(name)).unwrap();
        std::fs::write(folder.path().join(name), text.replace("<|end_of_text|>", "<think>")).unwrap();
    }
    let engine = with_template(folder.path(), template);
    assert_eq!(engine.tokenizer().token_id("<think>"), Some(MARK));
    engine
}

fn prompt(engine: &Engine, thinking: bool) -> Prompt {
    engine.prompt(&[], "Is it?", &Instructions { thinking, ..Instructions::default() }).unwrap()
}

/// The tokens that are chosen where the logits prefer one token after the other.
fn chosen(engine: &Engine, prompt: &Prompt, output: &StructuredOutput, preferred: &[u32]) -> Vec<u32> {
    let choose = |min_tokens| -> Vec<u32> {
        let sampling = Sampling { min_tokens, ..Sampling::default() };
        let grammar = Some(engine.grammar(output).unwrap());
        let request = GenerateRequest { grammar, ..GenerateRequest::new(shared(Vanilla), sampling) };
        let mut generator = Generator::new(engine, &request, prompt, 0);
        let mut token = |(at, preferred): (usize, &u32)| {
            let mut logits = vec![0.0; engine.decoder().config().vocab];
            logits[*preferred as usize] = 1.0;
            let token = generator.choose(&mut logits, at);
            assert!(generator.failure.is_none());
            token
        };
        preferred.iter().enumerate().map(&mut token).collect()
    };
    let tokens = choose(0);
    assert_eq!(choose(100), tokens, "a complete text ends the answer before the least tokens");
    tokens
}

fn yes() -> StructuredOutput {
    StructuredOutput::Choice(vec!["yes".to_owned()])
}

/// Thoughts of several tokens up to the last one of `</think>`, and then nothing but the wish to end.
fn thoughts(engine: &Engine) -> (Vec<u32>, usize) {
    let mut tokens = engine.tokenize("no <</think>").unwrap();
    let count = tokens.len();
    tokens.extend([END; 4]);
    (tokens, count)
}

#[test]
fn a_grammar_waits_for_the_end_of_thoughts_that_the_prompt_begins() {
    let engine = with_template(&tiny("llama"), BEGUN);
    let prompt = prompt(&engine, false);
    assert_eq!(prompt.thinking, Thinking::Begun);
    let (mut preferred, count) = thoughts(&engine);
    let tokens = chosen(&engine, &prompt, &yes(), &preferred);
    assert_eq!(tokens[..count], preferred[..count]);
    assert_eq!(engine.tokenizer().decode(&tokens[count..], true), "yes");
    assert_eq!(tokens.last(), Some(&END));
    // Thoughts do not end the answer.
    preferred.insert(1, END);
    let tokens = chosen(&engine, &prompt, &yes(), &preferred);
    assert_ne!(tokens[1], END);
    assert_eq!(tokens[2..=count], preferred[2..=count]);
    assert_eq!(engine.tokenizer().decode(&tokens[count + 1..], true), "yes");
}

#[test]
fn a_model_that_may_think_begins_with_thoughts_or_with_the_form() {
    let engine = with_mark(OPTIONAL);
    let (thinks, answers) = (prompt(&engine, true), prompt(&engine, false));
    assert_eq!((thinks.thinking, answers.thinking), (Thinking::Optional, Thinking::None));
    let (preferred, count) = thoughts(&engine);
    let preferred = [&[MARK], &preferred[..]].concat();
    let tokens = chosen(&engine, &thinks, &yes(), &preferred);
    assert_eq!(tokens[..=count], preferred[..=count]);
    let text = |tokens: &[u32]| engine.tokenizer().decode(tokens, false);
    assert!(text(&tokens[count + 1..]).starts_with("yes<|im_end|>"));
    let at_once = [&engine.tokenize("y").unwrap(), &[END; 3][..]].concat();
    assert_eq!(text(&chosen(&engine, &thinks, &yes(), &at_once)), "yes<|im_end|>");
    assert!(text(&chosen(&engine, &answers, &yes(), &preferred)).starts_with("yes<|im_end|>"));
    // A grammar may have thoughts of its own.
    let own = StructuredOutput::Lark(format!("start: <[{MARK}]> \"yes\""));
    let tokens = chosen(&engine, &thinks, &own, &[MARK, END, END, END, END]);
    assert!(text(&tokens).starts_with("<think>yes<|im_end|>"));
    // Without a token for the mark there are no thoughts.
    let engine = with_template(&tiny("llama"), OPTIONAL);
    let tokens = chosen(&engine, &prompt(&engine, true), &yes(), &[END; 4]);
    assert_eq!(engine.tokenizer().decode(&tokens, true), "yes");
}

/// An answer that does not leave its thoughts ends at its limit alone, with proposals and without.
#[test]
fn thoughts_without_an_end_go_on_to_the_limit() {
    let engine = with_template(&tiny("llama"), BEGUN);
    let prompt = prompt(&engine, false);
    let answer = |speculative_tokens| {
        let logit_bias = [(END, 100.0)].into();
        let sampling = Sampling { logit_bias, max_tokens: 30, ..Sampling::default() };
        let grammar = Some(engine.grammar(&yes()).unwrap());
        let request = GenerateRequest::new(shared(Vanilla), sampling);
        let request = GenerateRequest { grammar, speculative_tokens, ..request };
        engine.answer(&prompt, &request, |_| true).unwrap()
    };
    let plain = answer(0);
    assert_eq!((plain.tokens.len(), plain.finish), (30, FinishReason::Length));
    assert_eq!(answer(8).tokens, plain.tokens);
}
