//! The filter and the colours of a log, for programs that serve.

use std::io::IsTerminal;

use tracing::level_filters::LevelFilter;

/// Levels and modules of a log filter, for its error messages.
pub const LOG_LEVELS: &str = "levels are error, warn, info, debug, trace and off; a module has its level behind it, as in info,tantivy=warn";

/// The directives of a log filter such as `info, tantivy=warn`, without blanks: a blank before a level would make it the name of a module.
///
/// # Errors
/// With a word that is no level: such a word names a module, and the log of all others may be off.
pub fn log_directives(text: &str) -> Result<String, String> {
    let is_name = |word: &str| word.chars().all(|c| c.is_alphanumeric() || "-_:".contains(c));
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let words: Vec<&str> = text.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    match words.iter().find(|word| is_name(word) && !is_level(word)) {
        Some(word) => Err(format!("{word} is no level")),
        None => Ok(words.join(",")),
    }
}

/// Whether `stream` shows colours and the user wants them (<https://no-color.org>).
pub fn shows_colours(stream: &impl IsTerminal) -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::log_directives;

    #[test]
    fn words_of_a_filter_are_levels_or_have_one() {
        for (text, directives) in [
            ("info", "info"),
            ("WARN", "WARN"),
            ("3", "3"),
            ("info, tantivy=warn", "info,tantivy=warn"),
            ("refrain::text=trace, error,", "refrain::text=trace,error"),
            ("info,[answer]=debug", "info,[answer]=debug"),
        ] {
            assert_eq!(log_directives(text).as_deref(), Ok(directives));
        }
        for (wrong, word) in
            [("warning", "warning"), ("info,verbose", "verbose"), ("refrain_server", "refrain_server")]
        {
            assert_eq!(log_directives(wrong), Err(format!("{word} is no level")));
        }
    }
}
