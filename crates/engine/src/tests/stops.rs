//! Stop texts that are control tokens.

use refrain_fusion::Vanilla;

use super::*;
use crate::{Answer, FinishReason, GenerateRequest, Sampling};

/// A control token has no text in an answer, and ends it where it is a stop text, once the least tokens are there.
#[test]
fn a_control_token_is_a_stop_text() {
    let engine = engine(&tiny("llama"), exact(Dtype::F32));
    let prompt = random_prompt(&engine, 20, &[], 25, 5);
    let token = engine.tokenizer().token_id("<|im_start|>").unwrap();
    let answer = |stop: &str, min_tokens| -> Answer {
        let stop = vec![stop.to_owned()];
        let logit_bias = [(token, 100.0)].into();
        let sampling = Sampling { stop, min_tokens, logit_bias, max_tokens: 8, ..Sampling::default() };
        let request = GenerateRequest { ignore_eos: true, ..GenerateRequest::new(shared(Vanilla), sampling) };
        engine.answer(&prompt, &request, |_| true).unwrap()
    };
    for least in [0, 3] {
        let Answer { text, tokens, finish, .. } = answer("<|im_start|>", least);
        assert_eq!((tokens.len(), tokens.last(), finish), (least + 1, Some(&token), FinishReason::Stop));
        assert_eq!(text, engine.tokenizer().decode(&tokens[..least], true));
    }
    let without = answer("<|im_start|", 3);
    assert_eq!((without.tokens, without.finish), (vec![token; 8], FinishReason::Length));
}
