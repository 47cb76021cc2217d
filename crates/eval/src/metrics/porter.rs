//! The Porter stemmer as NLTK has it (`nltk.stem.PorterStemmer`, its default mode `NLTK_EXTENSIONS`).
//!
//! Porter, An algorithm for suffix stripping, 1980, with the extensions by which NLTK departs from it and from Snowball's:
//! irregular forms, `ies` and `ied` of four letters, `y` after a consonant, `alli`, `bli`, `fulli`, `logi`, and a stem of vowel
//! and consonant counted as one that takes an `e`.

/// Words that NLTK has by heart.
const IRREGULAR: [(&str, &str); 16] = [
    ("sky", "sky"),
    ("skies", "sky"),
    ("dying", "die"),
    ("lying", "lie"),
    ("tying", "tie"),
    ("news", "news"),
    ("innings", "inning"),
    ("inning", "inning"),
    ("outings", "outing"),
    ("outing", "outing"),
    ("cannings", "canning"),
    ("canning", "canning"),
    ("howe", "howe"),
    ("proceed", "proceed"),
    ("exceed", "exceed"),
    ("succeed", "succeed"),
];

/// A suffix and its replacement after a stem of `m > 0`.
type Rule = (&'static str, &'static str);

const STEP_2: [Rule; 21] = [
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("fulli", "ful"),
];

const STEP_3: [Rule; 7] = [
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
];

const STEP_4: [&str; 19] = [
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism",
    "ate", "iti", "ous", "ive", "ize",
];

/// The stem of a lowercase word.
pub(crate) fn stem(word: &str) -> String {
    if let Some((_, stem)) = IRREGULAR.iter().find(|(form, _)| *form == word) {
        return (*stem).into();
    }
    if word.len() <= 2 || !word.is_ascii() {
        return word.into();
    }
    let word = step_1a(word);
    let word = step_1b(&word);
    let word = step_2(step_1c(word));
    let word = replaced(&word, &STEP_3).unwrap_or(word);
    step_5(step_4(&word))
}

fn step_1a(word: &str) -> String {
    if let Some(stem) = word.strip_suffix("ies") {
        let end = if word.len() == 4 { "ie" } else { "i" };
        return format!("{stem}{end}");
    }
    match word.strip_suffix('s') {
        Some(stem) if word.ends_with("sses") => stem[..stem.len() - 1].into(),
        Some(stem) if !word.ends_with("ss") => stem.into(),
        _ => word.into(),
    }
}

fn step_1b(word: &str) -> String {
    if let Some(stem) = word.strip_suffix("ied") {
        let end = if word.len() == 4 { "ie" } else { "i" };
        return format!("{stem}{end}");
    }
    if let Some(stem) = word.strip_suffix("eed") {
        return if measure(stem) > 0 { format!("{stem}ee") } else { word.into() };
    }
    let Some(stem) =
        ["ed", "ing"].iter().find_map(|suffix| word.strip_suffix(suffix).filter(|stem| has_vowel(stem)))
    else {
        return word.into();
    };
    if ["at", "bl", "iz"].iter().any(|end| stem.ends_with(end)) {
        return format!("{stem}e");
    }
    if ends_in_double_consonant(stem) {
        let shorter = if stem.ends_with(['l', 's', 'z']) { stem } else { &stem[..stem.len() - 1] };
        return shorter.into();
    }
    if measure(stem) == 1 && takes_e(stem) { format!("{stem}e") } else { stem.into() }
}

fn step_1c(mut word: String) -> String {
    if word.len() > 2 && word.ends_with('y') && is_consonant(&word, word.len() - 2) {
        word.pop();
        word.push('i');
    }
    word
}

fn step_2(word: String) -> String {
    if let Some(stem) = word.strip_suffix("alli").filter(|stem| measure(stem) > 0) {
        return step_2(format!("{stem}al"));
    }
    if let Some(word) = replaced(&word, &STEP_2) {
        return word;
    }
    // The l is counted with the stem, so that `geo` and `theo` are long enough.
    match word.strip_suffix("ogi") {
        Some(stem) if stem.ends_with('l') && measure(stem) > 0 => format!("{stem}og"),
        _ => word,
    }
}

fn step_4(word: &str) -> String {
    let Some(stem) = STEP_4.iter().find_map(|suffix| word.strip_suffix(suffix)) else { return word.into() };
    let from_verb = !word.ends_with("ion") || stem.ends_with(['s', 't']);
    if measure(stem) > 1 && from_verb { stem.into() } else { word.into() }
}

fn step_5(mut word: String) -> String {
    if let Some(stem) = word.strip_suffix('e') {
        let syllables = measure(stem);
        if syllables > 1 || syllables == 1 && !takes_e(stem) {
            word.pop();
        }
    }
    if word.ends_with("ll") && measure(&word[..word.len() - 1]) > 1 {
        word.pop();
    }
    word
}

/// The word with the first suffix of the rules that it has replaced; itself where the stem before that is too short; none if it
/// has none of them.
fn replaced(word: &str, rules: &[Rule]) -> Option<String> {
    let (stem, end) = rules.iter().find_map(|(suffix, end)| Some((word.strip_suffix(suffix)?, end)))?;
    Some(if measure(stem) > 0 { format!("{stem}{end}") } else { word.into() })
}

/// Porter's consonant: no vowel, and no y after a consonant.
fn is_consonant(word: &str, at: usize) -> bool {
    consonants(word).nth(at).unwrap_or(false)
}

fn consonants(word: &str) -> impl Iterator<Item = bool> {
    word.bytes().scan(false, |after_consonant, letter| {
        *after_consonant = match letter {
            b'a' | b'e' | b'i' | b'o' | b'u' => false,
            b'y' => !*after_consonant,
            _ => true,
        };
        Some(*after_consonant)
    })
}

/// Porter's m: how often a consonant follows a vowel.
fn measure(stem: &str) -> usize {
    consonants(stem).zip(consonants(stem).skip(1)).filter(|(this, next)| !this && *next).count()
}

fn has_vowel(stem: &str) -> bool {
    consonants(stem).any(|consonant| !consonant)
}

fn ends_in_double_consonant(word: &str) -> bool {
    match word.as_bytes() {
        [.., a, b] => a == b && is_consonant(word, word.len() - 1),
        _ => false,
    }
}

/// Porter's *o: the word ends in consonant, vowel, consonant, the last no w, x or y; or, NLTK's, is a vowel and a consonant.
fn takes_e(word: &str) -> bool {
    match consonants(word).collect::<Vec<_>>()[..] {
        [false, true] => true,
        [.., true, false, true] => !word.ends_with(['w', 'x', 'y']),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of NLTK's PorterStemmer.
    #[test]
    fn stems_are_nltks() {
        let stems = "sky sky skies sky dying die news news innings inning howe howe succeed succeed \
            flies fli dies die ties tie died die spied spi happy happi enjoy enjoy enjoyment enjoy fly fli say say \
            geology geolog theology theolog logi logi radically radic generalli gener fully fulli hopefully hope \
            probably probabl use use used use owed owe caresses caress ponies poni feed feed agreed agre \
            plastered plaster bled bled motoring motor sing sing conflated conflat troubled troubl sized size \
            hopping hop tanned tan falling fall hissing hiss fizzed fizz failing fail filing file relational relat \
            vietnamization vietnam callousness callous formalize formal replacement replac element element \
            adoption adopt communism commun probate probat rate rate cease ceas controlling control roll roll \
            yyyy yyyi 7s 7s 1990s 1990 ing ing eed eed aed a as as";
        let stems: Vec<&str> = stems.split_whitespace().collect();
        for pair in stems.chunks_exact(2) {
            assert_eq!(stem(pair[0]), pair[1], "{}", pair[0]);
        }
    }

    #[test]
    fn other_letters_are_left_alone() {
        assert_eq!(stem("caf\u{e9}s"), "caf\u{e9}s");
        assert_eq!(stem("\u{2014}\u{2014}ed"), "\u{2014}\u{2014}ed");
    }
}
