//! The Chinese metrics of LongBench (`qa_f1_zh_score`, `rouge_zh_score`) over the words that jieba 0.42.1 cuts.

use std::sync::LazyLock;

use jieba_rs::Jieba;

use super::{qa, rouge, text};

/// jieba's dictionary: jieba-rs's with the one word that this lacks.
static JIEBA: LazyLock<Jieba> = LazyLock::new(|| {
    let mut jieba = Jieba::new();
    jieba.add_word("B超", Some(3), None);
    jieba
});

/// Punctuation that `qa_f1_zh` deletes beside ASCII's. `《` is missing in the reference.
const PUNCTUATION: &str = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏";

/// F1 of words without punctuation and whitespace.
pub(crate) fn words_f1(prediction: &str, reference: &str) -> f64 {
    let [prediction, reference] = [prediction, reference].map(|text| {
        let bare = cut(text).into_iter().map(|word| {
            let mut word = word.to_lowercase();
            word.retain(|c| !c.is_ascii_punctuation() && !PUNCTUATION.contains(c) && !text::is_space(c));
            word
        });
        bare.filter(|word| !word.is_empty()).collect::<Vec<_>>()
    });
    qa::f1(&prediction, &reference)
}

/// ROUGE-L of all that jieba cuts, punctuation included, one space between.
pub(crate) fn rouge_l(prediction: &str, reference: &str) -> f64 {
    let [prediction, reference] = [prediction, reference].map(|text| cut(text).join(" "));
    rouge::rouge_l(&prediction, &reference).f
}

/// The words of `jieba.cut(text)` with its defaults.
///
/// jieba-rs has jieba's algorithm and model, but for two things that are undone here: it takes ideographs beyond
/// U+9FD5 into words where jieba gives them singly, and it keeps `x-1.2.3` whole where jieba cuts it.
fn cut(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    for part in text.split_inclusive(is_beyond_jieba) {
        let (text, single) = match part.char_indices().next_back() {
            Some((last, c)) if is_beyond_jieba(c) => part.split_at(last),
            _ => (part, ""),
        };
        for token in JIEBA.cut(text, true) {
            words.extend(latin_pieces(token.word));
        }
        words.extend((!single.is_empty()).then_some(single));
    }
    words
}

/// Whether jieba-rs takes a character for part of a word that jieba's `[\u4E00-\u9FD5a-zA-Z0-9+#&\._%\-]` has not.
fn is_beyond_jieba(c: char) -> bool {
    matches!(c, '\u{9FD6}'..='\u{9FFF}' | '\u{3400}'..='\u{4DBF}' | '\u{F900}'..='\u{FAFF}' | '\u{20000}'..='\u{2FA1F}')
}

/// A word that begins with an ASCII letter or digit, cut by `[a-zA-Z0-9]+(?:\.\d+)?%?` into matches and the text
/// between them; another word is unchanged. Words of the dictionary have no dot, hyphen or underscore, so that none
/// of them is cut.
fn latin_pieces(mut word: &str) -> impl Iterator<Item = &str> {
    let latin = word.starts_with(|c: char| c.is_ascii_alphanumeric()) && word.contains(['.', '-', '_']);
    std::iter::from_fn(move || {
        let end = if latin { latin_piece(word) } else { word.len() };
        let (piece, rest) = word.split_at(end);
        word = rest;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Length of the first piece.
fn latin_piece(word: &str) -> usize {
    let run = |from: usize, is: fn(&u8) -> bool| {
        from + word.as_bytes()[from..].iter().take_while(|b| is(b)).count()
    };
    let mut end = run(0, u8::is_ascii_alphanumeric);
    if end == 0 {
        return word.find(|c: char| c.is_ascii_alphanumeric()).unwrap_or(word.len());
    }
    if word[end..].starts_with('.') {
        let fraction = run(end + 1, u8::is_ascii_digit);
        end = if fraction > end + 1 { fraction } else { end };
    }
    end + usize::from(word[end..].starts_with('%'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_jiebas() {
        // Values of jieba 0.42.1.
        let cases: [(&str, &[&str]); 6] = [
            ("小明硕士毕业于中国科学院计算所", &["小明", "硕士", "毕业", "于", "中国科学院", "计算所"]),
            // Found by the model, not in the dictionary.
            ("他来到了网易杭研大厦", &["他", "来到", "了", "网易", "杭研", "大厦"]),
            ("做B超检查", &["做", "B超", "检查"]),
            (
                "版本v1.2.3-rc_1升级50%-60%。",
                &["版本", "v1.2", ".", "3", "-", "rc", "_", "1", "升级", "50%", "-", "60%", "。"],
            ),
            ("㐀鿖我们𠀀\r\n好", &["㐀", "鿖", "我们", "𠀀", "\r\n", "好"]),
            ("a.1b-c%", &["a.1", "b", "-", "c%"]),
        ];
        for (text, words) in cases {
            assert_eq!(cut(text), words);
        }
    }

    #[test]
    fn f1_is_of_words_without_punctuation() {
        // Values of LongBench's qa_f1_zh_score.
        for (prediction, reference, expected) in [
            ("我来到北京清华大学。", "他来到了清华大学", 0.5),
            ("《红楼梦》", "红楼梦", 2.0 / 3.0),
            ("，。", "。", 0.0),
            ("", "", 0.0),
            ("ＡＢ abc ABC", "abc", 0.4),
        ] {
            let got = words_f1(prediction, reference);
            assert!((got - expected).abs() < 1e-12, "{prediction:?} {reference:?}: {got}");
        }
    }

    #[test]
    fn rouge_is_of_all_words() {
        // Values of LongBench's rouge_zh_score.
        for (prediction, reference, expected) in [
            ("我来到北京清华大学。", "他来到了清华大学", 0.4444444395061729),
            ("小明硕士毕业于中国科学院计算所", "小明毕业于中国科学院", 0.7999999952000001),
            ("版本1.2.3发布", "版本1.2发布", 0.8888888839506174),
            ("", "", 0.0),
            ("。", "。", 0.999999995),
        ] {
            let got = rouge_l(prediction, reference);
            assert!((got - expected).abs() < 1e-12, "{prediction:?} {reference:?}: {got}");
        }
    }
}
