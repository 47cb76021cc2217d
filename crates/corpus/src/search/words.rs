//! The words that texts are searched by.

use icu_normalizer::ComposingNormalizerBorrowed;
use icu_normalizer::properties::{CanonicalDecompositionBorrowed, Decomposed};
use tantivy::tokenizer::{Token, TokenStream, Tokenizer};
use unicode_segmentation::UnicodeSegmentation;

/// Most bytes of a word that is indexed.
const MAX_WORD_BYTES: usize = 128;
/// Separates a namespace from a text or a word of it.
const END_OF_NAMESPACE: char = '\0';
/// Letters of a word's beginning, by which its other endings and compounds are found.
const BEGINNING_LETTERS: usize = 5;
/// Share of its score that the beginning of a word adds, where a text has neither the word nor its letters without marks.
const BEGINNING_WEIGHT: f32 = 0.7;
/// Ends the beginning of a word in the index. No word has it.
const END_OF_BEGINNING: char = '*';

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
/// of Han, Hangul and Katakana each pair of neighbours. A word of several parts, such as an identifier, is followed by its parts.
pub(super) fn words(normalized: &str) -> impl Iterator<Item = String> {
    let is_indexed = |(_, word): &(usize, &str)| word.len() <= MAX_WORD_BYTES || word.chars().all(is_paired);
    // The character of Han before the next word, and where it ends.
    let mut before: Option<(usize, char)> = None;
    normalized.unicode_word_indices().filter(is_indexed).flat_map(move |(at, word)| {
        let end = at + word.len();
        let han = word.chars().next().filter(|c| is_han(*c) && c.len_utf8() == word.len());
        let neighbour = before.filter(|(end, _)| *end == at).map(|(_, c)| c);
        let pair = neighbour.zip(han).map(|(a, b)| String::from_iter([a, b]));
        before = han.map(|c| (end, c));
        let characters: Vec<char> = word.chars().collect();
        let mut parts = parts(&characters);
        parts.retain(|part| !is_separator(part[0]));
        let is_whole = parts.len() != 1 && !characters.iter().copied().any(is_paired);
        let whole = is_whole.then(|| folded(&characters));
        whole.into_iter().chain(parts.into_iter().flat_map(pairs)).chain(pair).collect::<Vec<_>>()
    })
}

/// The forms by which a word is indexed and searched for, each with the share of its score that counts: the word, its letters without
/// marks, and the beginning of these.
pub(super) fn forms(word: String) -> impl Iterator<Item = (String, f32)> {
    let unmarked = unmarked(&word);
    let beginning = beginning(&unmarked).map(|beginning| (beginning, BEGINNING_WEIGHT));
    let other = (unmarked != word).then_some((unmarked, 1.0));
    [Some((word, 1.0)), other, beginning].into_iter().flatten()
}

/// The beginning of a word of letters alone that has as many.
fn beginning(word: &str) -> Option<String> {
    let is_word = word.chars().all(char::is_alphabetic) && word.chars().count() >= BEGINNING_LETTERS;
    is_word.then(|| word.chars().take(BEGINNING_LETTERS).chain([END_OF_BEGINNING]).collect())
}

/// A folded word without accents, vowel points and the like, as it is typed on keyboards that lack them.
fn unmarked(word: &str) -> String {
    let decomposition = CanonicalDecompositionBorrowed::new();
    let mut unmarked = String::with_capacity(word.len());
    for mut c in word.chars() {
        while let Decomposed::Expansion(base, mark) = decomposition.decompose(c)
            && is_mark(base, mark)
        {
            c = base;
        }
        match c {
            'ł' => unmarked.push('l'),
            'ø' => unmarked.push('o'),
            'đ' | 'ð' => unmarked.push('d'),
            'ħ' => unmarked.push('h'),
            'ŧ' => unmarked.push('t'),
            'ı' => unmarked.push('i'),
            'æ' => unmarked.push_str("ae"),
            'œ' => unmarked.push_str("oe"),
            'þ' => unmarked.push_str("th"),
            c if unmarked.chars().next_back().is_some_and(|base| is_mark(base, c)) => {}
            c => unmarked.push(c),
        }
    }
    unmarked
}

/// Whether a character only marks the one before it. Cyrillic letters such as й and ї have marks that make them other letters.
fn is_mark(base: char, mark: char) -> bool {
    match mark {
        '\u{300}' | '\u{301}' => true,
        '\u{308}' if base == 'е' => true,
        '\u{302}'..='\u{36f}' => !matches!(base, '\u{400}'..='\u{52f}'),
        // The points and accents of Hebrew.
        '\u{591}'..='\u{5bd}' | '\u{5bf}' | '\u{5c1}' | '\u{5c2}' | '\u{5c4}' | '\u{5c5}' | '\u{5c7}' => true,
        // The lengthening stroke of Arabic, its vowel signs, and hamza and madda on a letter.
        '\u{640}' | '\u{64b}'..='\u{65f}' | '\u{670}' => true,
        _ => false,
    }
}

/// A part of a word, or the pairs of its characters in a script that is searched by these.
fn pairs(part: &[char]) -> Vec<String> {
    let length = if is_paired(part[0]) { part.len().min(2) } else { part.len() };
    part.windows(length).map(folded).collect()
}

/// The parts of a word, and what separates them.
fn parts(word: &[char]) -> Vec<&[char]> {
    let mut parts = Vec::new();
    let mut start = 0;
    for at in 1..=word.len() {
        if at == word.len() || !is_joined(word, at) {
            parts.push(&word[start..at]);
            start = at;
        }
    }
    parts
}

/// Whether a character of a word is of one part with the one before it. A number, such as 1.5, is one part.
fn is_joined(word: &[char], at: usize) -> bool {
    let (a, b) = (word[at - 1], word[at]);
    if is_separator(a) || is_separator(b) {
        return a != '_' && b != '_' && (a.is_numeric() || b.is_numeric());
    }
    // The last capital of `HTTPServer` begins a part, and that of `APIs` does not.
    let ends_acronym = a.is_uppercase() && word[at + 1..].iter().take_while(|c| c.is_lowercase()).count() > 1;
    let is_capital = b.is_uppercase() && (a.is_lowercase() || ends_acronym);
    let is_number = (a.is_numeric() && b.is_alphabetic()) || (a.is_alphabetic() && b.is_numeric());
    is_paired(a) == is_paired(b) && !is_capital && !is_number
}

/// Whether a character separates the parts of a word. UAX #29 takes it into the word between two letters.
fn is_separator(c: char) -> bool {
    matches!(c, '_' | '.' | ':' | '\'')
}

/// Whether a character is of Hangul or Katakana, which write several words without a space.
fn is_paired(c: char) -> bool {
    matches!(c, '\u{1100}'..='\u{11ff}' | '\u{30a1}'..='\u{30ff}' | '\u{31f0}'..='\u{31ff}' | '\u{ac00}'..='\u{d7a3}')
}

/// Whether a character is of Han, whose characters are searched by themselves and by pairs.
fn is_han(c: char) -> bool {
    matches!(c, '\u{3005}' | '\u{3007}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{20000}'..='\u{3ffff}')
}

fn folded(word: &[char]) -> String {
    word.iter().collect::<String>().to_lowercase().replace('ß', "ss")
}

/// The forms of all words of a normalized text.
pub(super) fn indexed(normalized: &str) -> impl Iterator<Item = String> {
    words(normalized).flat_map(forms).map(|(form, _)| form)
}

/// Splits a text of a namespace into the [`indexed`] forms of its words in that namespace.
#[derive(Clone, Debug, Default)]
pub(super) struct WordTokenizer {
    normalized: String,
}

/// The forms of a text's words.
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
        WordStream { namespace, words: Box::new(indexed(&self.normalized)), token: Token::default() }
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
            ("HTTPServer2", "httpserver2 http server 2"),
            ("APIs of XMLHttpRequest", "apis of xmlhttprequest xml http request"),
            ("5Nm, 20kg, v1.2.3", "5nm 5 nm 20kg 20 kg v1.2.3 v 1.2.3"),
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
            ("後輪のスポーク", "後 輪 後輪 の スポ ポー ーク"),
            ("自行车。车2号", "自 行 自行 车 行车 车 2 号"),
            ("佐々木", "佐 々 佐々 木 々木"),
        ] {
            assert_eq!(words_of(text).join(" "), words, "{text}");
        }
    }

    #[test]
    fn a_word_is_found_without_its_marks() {
        for (written, typed) in [
            ("Café", "cafe"),
            ("Łódź", "lodz"),
            ("Ångström", "angstrom"),
            ("İstanbul", "istanbul"),
            ("ısı", "isi"),
            ("Smørrebrød", "smorrebrod"),
            ("œuvre", "oeuvre"),
            ("Nguyễn", "nguyen"),
            ("m\u{303}", "m"),
            ("Ёлка", "елка"),
            ("за\u{301}мок", "замок"),
            ("Αθήνα", "αθηνα"),
            ("שָׁלוֹם", "שלום"),
            ("الكِتَابُ", "الكتاب"),
            ("أحمد", "احمد"),
        ] {
            let forms: Vec<String> = indexed(&normalized(written)).collect();
            assert!(forms.iter().any(|form| form == typed), "{written}: {forms:?}");
        }
        // Marks that make another letter stay.
        for word in ["йод", "їжак", "ガラス", "서울", "हिन्दी"] {
            assert_eq!(unmarked(word), word);
        }
    }

    #[test]
    fn words_of_letters_are_found_by_their_beginning() {
        let forms = |text: &str| indexed(&normalized(text)).collect::<Vec<_>>().join(" ");
        assert_eq!(forms("Policies of Vélos"), "policies polic* of vélos velos velos*");
        assert_eq!(forms("bolt 20245 a_12345"), "bolt 20245 a_12345 a 12345");
    }

    #[test]
    fn words_that_are_too_long_are_left_out() {
        assert_eq!(words_of(&"fooBar_".repeat(40)), [] as [&str; 0]);
        assert_eq!(words_of(&"서울".repeat(100)).len(), 199);
    }
}
