//! The words that texts are searched by.

use icu_normalizer::ComposingNormalizerBorrowed;
use tantivy::tokenizer::{Token, TokenStream, Tokenizer};
use unicode_segmentation::UnicodeSegmentation;

/// Most bytes of a word that is indexed.
const MAX_WORD_BYTES: usize = 128;
/// Separates a namespace from a text or a word of it.
const END_OF_NAMESPACE: char = '\0';

/// A text or a word of a namespace, as the index has it.
pub(super) fn in_namespace(namespace: &str, text: &str) -> String {
    format!("{namespace}{END_OF_NAMESPACE}{text}")
}

/// A text as it is split into words: in NFKC, with one kind of apostrophe, and without invisible characters.
pub(super) fn normalized(text: &str) -> String {
    let characters = text.chars().filter(|c| !is_invisible(*c)).map(|c| match c {
        // The apostrophes of typographers and of Ukrainian.
        '\u{2019}' | '\u{2bc}' => '\'',
        c => c,
    });
    ComposingNormalizerBorrowed::new_nfkc().normalize_iter(characters).collect()
}

/// Soft hyphens, joiners, marks of direction and variation selectors.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}')
}

/// The words of a normalized text by UAX #29, without case. In scripts without spaces, such as Chinese, each character is a word, and
/// of Hangul and Katakana each pair of neighbours. A word of several parts, such as an identifier, is followed by its parts.
pub(super) fn words(normalized: &str) -> impl Iterator<Item = String> {
    let is_indexed = |word: &&str| word.len() <= MAX_WORD_BYTES || word.chars().all(is_paired);
    normalized.unicode_words().filter(is_indexed).flat_map(|word| {
        let characters: Vec<char> = word.chars().collect();
        let parts: Vec<&[char]> =
            characters.chunk_by(|a, b| is_joined(*a, *b)).filter(|part| !is_separator(part[0])).collect();
        let is_whole = parts.len() != 1 && !characters.iter().copied().any(is_paired);
        let whole = is_whole.then(|| folded(&characters));
        whole.into_iter().chain(parts.into_iter().flat_map(pairs)).collect::<Vec<_>>()
    })
}

/// A part of a word, or the pairs of its characters in a script that is searched by these.
fn pairs(part: &[char]) -> Vec<String> {
    let length = if is_paired(part[0]) { part.len().min(2) } else { part.len() };
    part.windows(length).map(folded).collect()
}

/// Whether two neighbours in a word are of one part of it. A number, such as 1.5, is one part.
fn is_joined(a: char, b: char) -> bool {
    if is_separator(a) || is_separator(b) {
        return a != '_' && b != '_' && (a.is_numeric() || b.is_numeric());
    }
    is_paired(a) == is_paired(b) && !(a.is_lowercase() && b.is_uppercase())
}

/// Whether a character separates the parts of a word. UAX #29 takes it into the word between two letters.
fn is_separator(c: char) -> bool {
    matches!(c, '_' | '.' | ':' | '\'')
}

/// Whether a character is of Hangul or Katakana, which write several words without a space.
fn is_paired(c: char) -> bool {
    matches!(c, '\u{1100}'..='\u{11ff}' | '\u{30a1}'..='\u{30ff}' | '\u{31f0}'..='\u{31ff}' | '\u{ac00}'..='\u{d7a3}')
}

fn folded(word: &[char]) -> String {
    word.iter().collect::<String>().to_lowercase().replace('ß', "ss")
}

/// Splits a text of a namespace into the [`words`] of that namespace.
#[derive(Clone, Debug, Default)]
pub(super) struct WordTokenizer {
    normalized: String,
}

/// The words of a text.
pub(super) struct WordStream<'a> {
    namespace: &'a str,
    words: Box<dyn Iterator<Item = String> + 'a>,
    token: Token,
}

impl Tokenizer for WordTokenizer {
    type TokenStream<'a> = WordStream<'a>;

    fn token_stream<'a>(&'a mut self, text: &'a str) -> WordStream<'a> {
        let (namespace, text) = text.split_once(END_OF_NAMESPACE).unwrap_or(("", text));
        self.normalized = normalized(text);
        WordStream { namespace, words: Box::new(words(&self.normalized)), token: Token::default() }
    }
}

impl TokenStream for WordStream<'_> {
    fn advance(&mut self) -> bool {
        let Some(word) = self.words.next() else { return false };
        self.token.text = in_namespace(self.namespace, &word);
        // The first position is one after that of `Token::default()`.
        self.token.position = self.token.position.wrapping_add(1);
        true
    }

    fn token(&self) -> &Token {
        &self.token
    }

    fn token_mut(&mut self) -> &mut Token {
        &mut self.token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of(text: &str) -> Vec<String> {
        words(&normalized(text)).collect()
    }

    #[test]
    fn one_word_in_several_spellings_is_one() {
        for (written, asked) in [
            ("don’t", "don't"),
            ("пʼять", "п'ять"),
            ("Ko\u{308}ln", "KÖLN"),
            ("Kraft\u{ad}fahr\u{200b}zeug", "Kraftfahrzeug"),
            ("ＡＢＣ１２３", "abc123"),
            ("STRASSE", "Straße"),
            ("oﬃce", "office"),
            ("ﾃﾞｰﾀ", "データ"),
        ] {
            assert_eq!(words_of(written), words_of(asked), "{written}");
        }
    }

    #[test]
    fn a_word_of_several_parts_is_followed_by_them() {
        for (text, words) in [
            ("L’eau bout.", "l'eau l eau bout"),
            ("employee_handbook_2024.pdf", "employee_handbook_2024 employee handbook 2024 pdf"),
            ("config.yaml", "config.yaml config yaml"),
            ("Status:open", "status:open status open"),
            ("fooBar", "foobar foo bar"),
            ("at the end.Next", "at the end.next end next"),
            ("1.5 and 1'000.25 of HTTP", "1.5 and 1'000.25 of http"),
            ("size_2.5", "size_2.5 size 2.5"),
            ("__", ""),
        ] {
            assert_eq!(words_of(text).join(" "), words, "{text}");
        }
    }

    #[test]
    fn scripts_without_spaces_are_searched_by_characters_and_pairs() {
        for (text, words) in [
            ("서울은", "서울 울은"),
            ("물 AI모델", "물 ai 모델"),
            ("データベース", "デー ータ タベ ベー ース"),
            ("後輪のスポーク", "後 輪 の スポ ポー ーク"),
        ] {
            assert_eq!(words_of(text).join(" "), words, "{text}");
        }
    }

    #[test]
    fn words_that_are_too_long_are_left_out() {
        assert_eq!(words_of(&"fooBar_".repeat(40)), [] as [&str; 0]);
        assert_eq!(words_of(&"서울".repeat(100)).len(), 199);
    }
}
