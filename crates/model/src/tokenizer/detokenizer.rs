use super::Tokenizer;

/// Ids to text, one at a time, never splitting a character.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The ids of the text given out last, which decide how the next one is spelled (a leading space), and those since.
    ids: Vec<u32>,
    /// Number of the former.
    given: usize,
    /// Text of the latter, if it does not end in a whole character yet.
    held: String,
}

impl Detokenizer {
    /// Adds an id; returns the text that it completes, if any. Special tokens have none.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Option<String> {
        self.ids.push(id);
        let context = tokenizer.decode(&self.ids[..self.given], true);
        let whole = tokenizer.decode(&self.ids, true);
        let new = whole.get(context.len()..).unwrap_or_default();
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            new.clone_into(&mut self.held);
            return None;
        }
        let new = new.to_owned();
        self.held.clear();
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Some(new)
    }

    /// The end: what was held back, an incomplete character as U+FFFD.
    pub fn finish(&mut self) -> Option<String> {
        self.given = self.ids.len();
        Some(std::mem::take(&mut self.held)).filter(|text| !text.is_empty())
    }
}
