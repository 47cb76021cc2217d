//! Tokens that may come next, proposed from what was said before: answers over documents copy from them.
//!
//! Prompt lookup decoding (as vLLM's `ngram` proposer): the last tokens of prompt and answer are looked for further up, and those that
//! followed there are proposed. A step of decoding verifies them, so that an answer is the one that it would be without.

/// Tokens of a match that is worth a proposal.
const SHORTEST_MATCH: usize = 2;
/// Tokens beyond which a longer match is no better.
const LONGEST_MATCH: usize = 16;
/// The share of proposed tokens that a sequence accepts, before it has shown any.
const FIRST_ACCEPTANCE: f64 = 0.7;
/// Weight of a step's acceptance in the mean.
const NEWEST: f64 = 0.25;
/// The acceptance that a sequence comes back to, while nothing is proposed, by this much a step.
const RECOVERY: (f64, f64) = (0.5, 0.02);

/// Proposals for one sequence.
#[derive(Clone, Debug)]
pub(crate) struct PromptLookup {
    /// Tokens of prompt and answer.
    tokens: Vec<u32>,
    /// Mean share of proposed tokens that were accepted.
    acceptance: f64,
    proposal: Vec<u32>,
    /// Tokens that were verified, and those of them that were right.
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
}

impl PromptLookup {
    pub(crate) fn new(prompt: Vec<u32>) -> PromptLookup {
        PromptLookup {
            tokens: prompt,
            acceptance: FIRST_ACCEPTANCE,
            proposal: Vec::new(),
            drafted: 0,
            accepted: 0,
        }
    }

    /// Tokens of prompt and answer.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adds a token of the answer.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// `most` tokens that followed the longest match of the last tokens, or none; of equally long matches the latest counts. A match that
    /// reaches to the end goes on with what it proposes, as a repetition does.
    pub(crate) fn propose(&mut self, most: usize) -> &[u32] {
        let PromptLookup { tokens, proposal, .. } = self;
        proposal.clear();
        let Some((last, before)) = tokens.split_last().filter(|_| most > 0) else { return &[] };
        let (mut longest, mut place) = (SHORTEST_MATCH - 1, 0);
        for end in (0..before.len()).rev().filter(|end| before[*end] == *last) {
            let backwards = before[..end].iter().rev().zip(before.iter().rev());
            let length = 1 + backwards.take(LONGEST_MATCH - 1).take_while(|(a, b)| a == b).count();
            if length > longest {
                (longest, place) = (length, end + 1);
                if length == LONGEST_MATCH {
                    break;
                }
            }
        }
        while place > 0 && proposal.len() < most {
            let next = place + proposal.len();
            proposal.push(tokens.get(next).copied().unwrap_or_else(|| proposal[next - tokens.len()]));
        }
        proposal
    }

    /// Probability that a proposed token is accepted where those before it were.
    pub(crate) fn acceptance(&self) -> f64 {
        self.acceptance
    }

    /// Takes note that `accepted` of `proposed` tokens were right.
    pub(crate) fn learn(&mut self, proposed: usize, accepted: usize) {
        (self.drafted, self.accepted) = (self.drafted + proposed, self.accepted + accepted);
        if proposed == 0 {
            let (most, step) = RECOVERY;
            self.acceptance = self.acceptance.max((self.acceptance + step).min(most));
            return;
        }
        // Tokens after the first wrong one show nothing.
        let judged = (accepted + 1).min(proposed);
        self.acceptance += NEWEST * (accepted as f64 / judged as f64 - self.acceptance);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proposed(tokens: &[u32], most: usize) -> Vec<u32> {
        PromptLookup::new(tokens.to_vec()).propose(most).to_vec()
    }

    #[test]
    fn what_followed_the_longest_match_is_proposed_and_the_latest_of_equals() {
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 9, 2, 3], 2), [4, 5]);
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 9, 2, 3], 9), [4, 5, 9, 2, 3, 4, 5, 9, 2]);
        assert_eq!(proposed(&[7, 2, 3, 4, 1, 2, 3, 5, 7, 2, 3], 1), [4], "three tokens go before two");
        assert_eq!(proposed(&[2, 3, 4, 2, 3, 5, 2, 3], 1), [5]);
        assert_eq!(proposed(&[6, 6, 6], 4), [6; 4], "a match may overlap the end");
        assert!(proposed(&[1, 3, 4, 2, 3], 2).is_empty(), "one token is no match");
        assert!(proposed(&[1, 2, 3, 1, 2], 0).is_empty());
        assert!(proposed(&[], 4).is_empty() && proposed(&[1], 4).is_empty());
    }

    #[test]
    fn acceptance_follows_what_is_seen() {
        let mut lookup = PromptLookup::new(vec![1, 2, 1]);
        for _ in 0..20 {
            lookup.learn(4, 0);
        }
        assert!(lookup.acceptance() < 0.01);
        for _ in 0..100 {
            lookup.learn(0, 0);
        }
        assert_eq!(lookup.acceptance(), 0.5);
        for _ in 0..20 {
            lookup.learn(4, 4);
        }
        assert!(lookup.acceptance() > 0.99);
        lookup.learn(0, 0);
        assert!(lookup.acceptance() > 0.99, "nothing proposed tells nothing");
    }
}
