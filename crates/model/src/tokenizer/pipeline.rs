//! Byte-pair encoding behind added tokens, a normaliser and a pre-tokenizer, as in Hugging Face's `tokenizers`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::models::bpe::{BPE, BpeTrainer, Vocab};
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper, Token,
};

use super::spec::TokenizerSpec;
use crate::config::MAX_VOCABULARY;
use crate::error::{ModelError, Result};

/// Words whose tokens each thread that tokenises remembers. A word of 255 bytes takes 8 KiB, and more words than these make texts no faster: most
/// of the time goes into finding words.
const CACHED_WORDS: usize = 500;

/// The meaning of special tokens that are written in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Special tokens are recognised: for text that the model's own chat template wrote.
    Parse,
    /// Special tokens are ordinary characters: for text that a user wrote. Added tokens that are neither control tokens nor look
    /// like markup (runs of spaces, say), and tags of HTML, are still recognised, as they are in the text that the model learned from.
    Plain,
}

/// A tokenizer's encoding half.
#[derive(Debug)]
pub(super) struct Pipeline {
    vocabulary: Vocabulary,
    /// For text that begins a segment.
    start: Stage,
    /// For text that continues one, where that differs.
    inside: Option<Stage>,
    prefix: Prefix,
}

/// Where a space is put before the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    Never,
    /// At the beginning of the text only.
    First,
    /// At the beginning and after every added token.
    EachSegment,
}

/// The preparation of text before the model sees it.
#[derive(Debug)]
struct Stage {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    /// All added tokens.
    parse: AddedVocabulary,
    /// Added tokens that a user's text may give.
    plain: AddedVocabulary,
}

/// The model's tokens. Control tokens are outside of `bpe`: no merge and no whole word can give them.
#[derive(Debug)]
struct Vocabulary {
    bpe: BPE,
    /// Tokens that only [`AddedVocabulary`] gives, or none.
    outside: HashMap<String, u32>,
    outside_texts: HashMap<u32, String>,
    added: Vec<u32>,
    /// Tokens that [`Specials::Plain`] text cannot give, in ascending order.
    reserved: Vec<u32>,
    size: usize,
    /// The greatest id that a text may give, plus 1.
    text_ids: usize,
    /// Whether a token has the end of a word and the space behind it.
    spans_words: bool,
    /// Whether a token has a line break and a character of the next line.
    spans_lines: bool,
}

impl Pipeline {
    pub(super) fn build(spec: TokenizerSpec) -> Result<Self> {
        let prefix = prefix_of(&spec.normalizer).max_with(prefix_of(&spec.pre_tokenizer));
        let bare = |value: &Value| without_prefix(value.clone());
        let (normalizer, pre_tokenizer) = (spec.normalizer.clone(), spec.pre_tokenizer.clone());
        let (added, path) = (spec.added.clone(), spec.path.clone());
        let vocabulary = Vocabulary::build(spec)?;
        let start = Stage::build(&path, &normalizer, &pre_tokenizer, &added, &vocabulary)?;
        let inside = match prefix {
            Prefix::Never => None,
            Prefix::First | Prefix::EachSegment => {
                Some(Stage::build(&path, &bare(&normalizer), &bare(&pre_tokenizer), &added, &vocabulary)?)
            }
        };
        Ok(Self { vocabulary, start, inside, prefix })
    }

    /// The ids of a text that stands alone, in one piece.
    pub(super) fn encode_whole(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        self.start.encode(&self.vocabulary, text, specials)
    }

    /// The ids of a text that comes after the token `last`, in one piece.
    pub(super) fn encode_whole_after(&self, last: u32, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let vocabulary = &self.vocabulary;
        match (&self.inside, self.prefix) {
            (None, _) => self.encode_whole(text, specials),
            (Some(inside), Prefix::First) => inside.encode(vocabulary, text, specials),
            _ if self.is_added(last) => self.encode_whole(text, specials),
            (Some(inside), _) => {
                let (head, tail) = text.split_at(self.start.first_added(text, specials));
                let mut ids = inside.encode(vocabulary, head, specials)?;
                ids.extend(self.encode_whole(tail, specials)?);
                Ok(ids)
            }
        }
    }

    /// Whether a space is put before a text that stands alone.
    pub(super) fn has_prefix(&self) -> bool {
        self.prefix != Prefix::Never
    }

    /// Whether a token has the end of a word and the space behind it.
    pub(super) fn spans_words(&self) -> bool {
        self.vocabulary.spans_words
    }

    /// Whether a token has a line break and a character of the next line.
    pub(super) fn spans_lines(&self) -> bool {
        self.vocabulary.spans_lines
    }

    pub(super) fn token_id(&self, text: &str) -> Option<u32> {
        self.vocabulary.token_to_id(text)
    }

    pub(super) fn token_text(&self, id: u32) -> Option<String> {
        self.vocabulary.id_to_token(id)
    }

    /// Whether a token is one that is looked for in the text before anything else.
    pub(super) fn is_added(&self, id: u32) -> bool {
        self.vocabulary.added.binary_search(&id).is_ok()
    }

    /// Whether a token is one that [`Specials::Plain`] text cannot give.
    pub(super) fn is_reserved(&self, id: u32) -> bool {
        self.vocabulary.reserved.binary_search(&id).is_ok()
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocabulary.size
    }

    /// The greatest id that a text may give, plus 1: those of control tokens and markup may be greater.
    pub(super) fn text_ids(&self) -> usize {
        self.vocabulary.text_ids
    }
}

impl Stage {
    fn build(
        path: &Path,
        normalizer: &Value,
        pre_tokenizer: &Value,
        added: &BTreeMap<u32, AddedToken>,
        vocabulary: &Vocabulary,
    ) -> Result<Self> {
        let wrong = |message: String| ModelError::Tokenizer { path: path.to_owned(), message };
        let part = |what: &str, e: &dyn std::fmt::Display| wrong(format!("the {what} cannot be read: {e}"));
        let normalizer: Option<NormalizerWrapper> =
            serde_json::from_value(normalizer.clone()).map_err(|e| part("normalizer", &e))?;
        let pre_tokenizer =
            serde_json::from_value(pre_tokenizer.clone()).map_err(|e| part("pre_tokenizer", &e))?;
        let matcher = |wanted: fn(&AddedToken) -> bool| {
            let mut matcher = AddedVocabulary::new();
            let tokens = added.values().filter(|token| wanted(token)).cloned();
            matcher
                .add_tokens(tokens, vocabulary, normalizer.as_ref())
                .map_err(|e| part("added tokens", &e))?;
            Ok(matcher)
        };
        let (parse, plain) = (matcher(|_| true)?, matcher(is_ordinary)?);
        Ok(Self { normalizer, pre_tokenizer, parse, plain })
    }

    fn segments(&self, text: &str, specials: Specials) -> PreTokenizedString {
        let added = match specials {
            Specials::Parse => &self.parse,
            Specials::Plain => &self.plain,
        };
        added.extract_and_normalize(self.normalizer.as_ref(), text)
    }

    /// Where the first added token begins, in bytes; the text's length if there is none.
    fn first_added(&self, text: &str, specials: Specials) -> usize {
        let segments = self.segments(text, specials);
        let splits = segments.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let first = splits.into_iter().find(|(_, _, tokens)| tokens.is_some()).map(|(_, at, _)| at.0);
        first.filter(|at| text.is_char_boundary(*at)).unwrap_or(text.len())
    }

    fn encode(&self, vocabulary: &Vocabulary, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let mut splits = self.segments(text, specials);
        let before = |e: tokenizers::Error| ModelError::Encode { bytes: text.len(), message: e.to_string() };
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut splits).map_err(before)?;
        }
        splits.tokenize(|part| vocabulary.bpe.tokenize(part.get())).map_err(before)?;
        let splits = splits.get_splits(OffsetReferential::Original, OffsetType::None);
        Ok(splits.iter().flat_map(|(_, _, tokens)| tokens.iter().flatten()).map(|token| token.id).collect())
    }
}

/// Elements of HTML whose tags Gemma's vocabularies hold as added tokens of text. No chat template marks its own parts with them; `s` is not among
/// them, because `<s>` begins a sequence elsewhere.
const HTML: &str =
    "b blockquote caption code em h1 h2 h3 h4 h5 h6 i strong sub sup table tbody td tfoot th thead tr u";

/// Whether a user's text may give an added token: it is no control token and no markup but HTML's.
fn is_ordinary(token: &AddedToken) -> bool {
    !token.special && (!is_markup(&token.content) || is_html(&token.content))
}

/// Whether a token is the tag of an element of [`HTML`].
fn is_html(token: &str) -> bool {
    let Some(tag) = token.strip_prefix('<').and_then(|tag| tag.strip_suffix('>')) else { return false };
    let name = tag.strip_prefix('/').unwrap_or(tag);
    HTML.split(' ').any(|element| element == name)
}

/// The characters of vocabularies that stand for a space and a line break.
const SPACES: [char; 4] = ['▁', 'Ġ', 'Ċ', '\n'];

/// Whether a token has a letter or digit with a space or line break behind it, so that a text cannot be cut between the two.
pub(super) fn spans_words(token: &str) -> bool {
    let mut before = None;
    token.chars().any(|c| {
        let is_space = SPACES.contains(&c);
        let spans = is_space && before.is_some_and(|before: char| before.is_alphanumeric());
        before = (!is_space).then_some(c);
        spans
    })
}

/// Whether a token has a line break with a character behind it that is no white space, so that a text cannot be cut between the two.
pub(super) fn spans_lines(token: &str) -> bool {
    // Byte-level vocabularies write white space of one byte as one of these.
    let is_space = |c: char| c.is_whitespace() || matches!(c, '▁' | 'Ġ' | '\u{109}'..='\u{10d}');
    let pairs = token.chars().zip(token.chars().skip(1));
    pairs.into_iter().any(|(before, behind)| matches!(before, '\n' | 'Ċ') && !is_space(behind))
}

/// Whether a token looks like markup: `<tool_call>`, `[INST]`.
pub(super) fn is_markup(token: &str) -> bool {
    let text = token.trim_matches(|c: char| c.is_whitespace() || c == '▁');
    let bracketed = |open, close| text.starts_with(open) && text.ends_with(close) && text.len() > 2;
    bracketed('<', '>') || bracketed('[', ']')
}

impl Vocabulary {
    fn build(spec: TokenizerSpec) -> Result<Self> {
        let TokenizerSpec { path, mut vocab, merges, added, unused, unknown, .. } = spec;
        let wrong = |message: String| ModelError::Tokenizer { path: path.clone(), message };
        let is_unknown = |text: &str| unknown.as_deref() == Some(text);
        let greatest = vocab.values().chain(added.keys()).chain(unused.keys()).max().copied();
        // Tables have an entry for each id, and ids come from a file.
        if let Some(id) = greatest.filter(|id| *id as usize >= MAX_VOCABULARY) {
            return Err(wrong(format!("a token has the id {id}; ids below {MAX_VOCABULARY} are read")));
        }
        let (mut outside, mut outside_texts) = (HashMap::new(), HashMap::new());
        let mut reserved = Vec::new();
        for (id, token) in &added {
            let inside = vocab.get(&token.content).copied();
            if inside.is_some_and(|other| other != *id) {
                let message = format!("the added token '{}' has two ids: {inside:?} and {id}", token.content);
                return Err(wrong(message));
            }
            if token.special && !is_unknown(&token.content) {
                vocab.remove(&token.content);
            }
            if !vocab.contains_key(&token.content) && !token.content.is_empty() {
                outside.insert(token.content.clone(), *id);
                if !is_ordinary(token) {
                    reserved.push(*id);
                }
            }
            outside_texts.insert(*id, token.content.clone());
        }
        outside_texts.extend(unused);
        let control = |text: &str| outside.contains_key(text);
        let mut kept = Vec::with_capacity(merges.len());
        for (left, right) in merges {
            let whole = format!("{left}{right}");
            let parts = [left.as_str(), &right, &whole];
            if parts.iter().all(|part| vocab.contains_key(*part)) {
                kept.push((left, right));
            } else if !parts.iter().any(|part| control(part)) {
                return Err(wrong(format!(
                    "the merge of '{left}' and '{right}' is of tokens that are not there"
                )));
            }
        }
        if let Some(text) = unknown.as_ref().filter(|text| !vocab.contains_key(*text)) {
            return Err(wrong(format!("the unknown token '{text}' is not in the vocabulary")));
        }
        let spans_words = vocab.keys().any(|token| spans_words(token));
        let spans_lines = vocab.keys().any(|token| spans_lines(token));
        let of_text = |id: &&u32| added.get(id).is_none_or(is_ordinary);
        let text_ids = vocab.values().chain(added.keys()).filter(of_text).max();
        let text_ids = text_ids.map_or(0, |id| *id as usize + 1);
        let mut builder = BPE::builder()
            .vocab_and_merges(vocab.into_iter().collect::<Vocab>(), kept)
            .cache_capacity(CACHED_WORDS)
            .fuse_unk(spec.fuse_unknown)
            .byte_fallback(spec.byte_fallback)
            .ignore_merges(spec.ignore_merges);
        if let Some(unknown) = unknown {
            builder = builder.unk_token(unknown);
        }
        let bpe = builder.build().map_err(|e| wrong(format!("the vocabulary cannot be used: {e}")))?;
        let size = greatest.map_or(0, |id| id as usize + 1);
        let added = added.into_keys().collect();
        Ok(Self { bpe, outside, outside_texts, added, reserved, size, text_ids, spans_words, spans_lines })
    }
}

impl Model for Vocabulary {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        self.bpe.tokenize(sequence)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.outside.get(token).copied().or_else(|| self.bpe.token_to_id(token))
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.outside_texts.get(&id).cloned().or_else(|| self.bpe.id_to_token(id))
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        let mut vocab = self.bpe.get_vocab();
        vocab.extend(self.outside.clone());
        vocab
    }

    fn get_vocab_size(&self) -> usize {
        self.size
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        self.bpe.save(folder, prefix)
    }

    fn get_trainer(&self) -> BpeTrainer {
        self.bpe.get_trainer()
    }
}

impl Prefix {
    fn max_with(self, other: Self) -> Self {
        match (self, other) {
            (Self::EachSegment, _) | (_, Self::EachSegment) => Self::EachSegment,
            (Self::First, _) | (_, Self::First) => Self::First,
            _ => Self::Never,
        }
    }
}

/// The description's own type, and those of its parts where it is a sequence.
pub(super) fn parts(value: &Value) -> Vec<&Value> {
    let list = ["normalizers", "pretokenizers", "decoders", "processors"].iter().find_map(|k| value.get(k));
    match list.and_then(Value::as_array) {
        Some(list) => list.iter().flat_map(parts).collect(),
        None if value.is_null() => Vec::new(),
        None => vec![value],
    }
}

/// The name of a part's type.
pub(super) fn type_of(value: &Value) -> &str {
    value.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn prefix_of(value: &Value) -> Prefix {
    let one = |part: &&Value| match type_of(part) {
        "Prepend" => Prefix::EachSegment,
        "ByteLevel" if part.get("add_prefix_space") == Some(&Value::Bool(true)) => Prefix::EachSegment,
        "Metaspace" if part.get("add_prefix_space") == Some(&Value::Bool(false)) => Prefix::Never,
        "Metaspace" => match part.get("prepend_scheme").and_then(Value::as_str) {
            Some("never") => Prefix::Never,
            Some("first") => Prefix::First,
            _ => Prefix::EachSegment,
        },
        _ => Prefix::Never,
    };
    parts(value).iter().map(one).fold(Prefix::Never, Prefix::max_with)
}

/// The description without the parts that put a space before the text.
fn without_prefix(mut value: Value) -> Value {
    match type_of(&value) {
        "Prepend" => return Value::Null,
        "ByteLevel" => value["add_prefix_space"] = Value::Bool(false),
        "Metaspace" => {
            value["prepend_scheme"] = "never".into();
            value["add_prefix_space"] = Value::Bool(false);
        }
        _ => {}
    }
    for key in ["normalizers", "pretokenizers"] {
        if let Some(Value::Array(list)) = value.get_mut(key) {
            let parts = std::mem::take(list);
            *list = parts.into_iter().map(without_prefix).filter(|part| !part.is_null()).collect();
        }
    }
    value
}
