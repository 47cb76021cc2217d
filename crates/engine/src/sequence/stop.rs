//! Stop strings over streamed text.

/// Passes text on and holds back what may be the beginning of a stop string.
#[derive(Debug)]
pub(crate) struct StopFilter {
    stops: Vec<String>,
    held: String,
}

impl StopFilter {
    pub(crate) fn new(stops: &[String]) -> StopFilter {
        StopFilter {
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            held: String::new(),
        }
    }

    /// Adds text; returns what can be shown, and whether a stop string was met (the text ends before it).
    pub(crate) fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.longest_beginning();
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The text that was held back, at the end of the answer.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
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
}
