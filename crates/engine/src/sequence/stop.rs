//! Stop strings over streamed text.

/// Passes text on and holds back what may be the beginning of a stop string.
#[derive(Debug)]
pub(crate) struct StopFilter {
    stops: Vec<String>,
    /// The end of the text, as far as a stop string may begin with it.
    held: String,
    /// Bytes at the beginning of `held` that are shown: they came before stop strings counted.
    shown: usize,
}

impl StopFilter {
    pub(crate) fn new(stops: &[String]) -> StopFilter {
        StopFilter {
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            held: String::new(),
            shown: 0,
        }
    }

    /// Adds text in which no stop string counts. One that begins in it and ends behind it does.
    pub(crate) fn pass(&mut self, text: &str) {
        self.held.push_str(text);
        self.held = self.held.split_off(self.held.len() - self.longest_beginning());
        self.shown = self.held.len();
    }

    /// Adds text; returns what can be shown, and whether a stop string was met (the text ends before it).
    pub(crate) fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let is_met = |at: usize| {
            let ends_here =
                |stop: &String| self.held[at..].starts_with(&**stop) && at + stop.len() > self.shown;
            self.stops.iter().any(ends_here)
        };
        let met = self.held.char_indices().map(|(at, _)| at).find(|at| is_met(*at));
        let end = met.unwrap_or_else(|| self.held.len() - self.longest_beginning());
        let rest = self.held.split_off(end);
        let shown = self.held.split_off(self.shown.min(end));
        self.shown = self.shown.saturating_sub(end);
        self.held = if met.is_some() { String::new() } else { rest };
        (shown, met.is_some())
    }

    /// The text that was held back, at the end of the answer.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held).split_off(std::mem::take(&mut self.shown))
    }

    /// Bytes at the end of the held text that begin a stop string.
    fn longest_beginning(&self) -> usize {
        let begins = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]));
        let starts = self.held.char_indices().map(|(at, _)| at);
        starts.filter(|at| begins(*at)).map(|at| self.held.len() - at).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_string_is_found_across_pieces_and_never_shown() {
        let mut filter = StopFilter::new(&["\n\nQ:".to_owned(), "END".to_owned()]);
        assert_eq!(filter.push("one\n"), ("one".to_owned(), false));
        assert_eq!(filter.push("two\n\n"), ("\ntwo".to_owned(), false));
        assert_eq!(filter.push("Q: more"), (String::new(), true));
        let mut filter = StopFilter::new(&["END".to_owned()]);
        assert_eq!(filter.push("ÄE"), ("Ä".to_owned(), false));
        assert_eq!(filter.push("N"), (String::new(), false));
        assert_eq!(filter.finish(), "EN");
    }

    #[test]
    fn a_stop_string_counts_that_ends_behind_the_text_in_which_none_does() {
        let stops = ["\n\nQ:".to_owned(), "aa".to_owned()];
        let mut filter = StopFilter::new(&stops);
        filter.pass("one\n");
        filter.pass("\n");
        assert_eq!(filter.push("Q"), (String::new(), false));
        assert_eq!(filter.push(": more"), (String::new(), true));
        let mut filter = StopFilter::new(&stops);
        filter.pass("\n\nQ: aa");
        assert_eq!(filter.push(" b"), (" b".to_owned(), false), "one that ends there does not count");
        filter.pass("a");
        assert_eq!(filter.push("b\n"), ("b".to_owned(), false));
        assert_eq!((filter.finish(), filter.finish()), ("\n".to_owned(), String::new()));
        filter.pass("\n");
        assert_eq!(filter.push("\nQ"), (String::new(), false));
        assert_eq!(filter.finish(), "\nQ");
    }
}
