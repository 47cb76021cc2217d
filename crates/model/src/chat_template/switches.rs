//! Switches that a template looks for in the system message, as SmolLM3's does: it goes by them, and takes them out of the text.
//!
//! The text has a placeholder where [`ChatTemplate::split`](super::ChatTemplate::split) renders, so its switches stand behind that.

use super::message::Message;
use crate::error::Result;

/// The switches, in the order in which SmolLM3's template takes them out.
const SWITCHES: [&str; 3] = ["/no_think", "/think", "/system_override"];
/// A text by which a template is probed.
const PROBE: &str = "probed";

/// The switches in a system message that a template takes out of it, as its rendering of a probe shows.
pub(super) fn heeded(system: &str, render: impl Fn(&[Message]) -> Result<String>) -> Vec<&'static str> {
    let is_heeded = |switch: &&str| {
        let probe = format!("{PROBE}{switch}");
        let turns = [Message::text("system", &probe), Message::text("user", "q")];
        let is_taken_out = |written: String| written.contains(PROBE) && !written.contains(&probe);
        system.contains(*switch) && render(&turns).is_ok_and(is_taken_out)
    };
    SWITCHES.into_iter().filter(is_heeded).collect()
}

/// A text without the switches, and those that it has, one behind the other.
pub(super) fn apart(text: &str, switches: &[&str]) -> (String, String) {
    let (mut text, mut found) = (text.to_owned(), String::new());
    for switch in switches {
        if text.contains(switch) {
            text = text.replace(switch, "");
            found.push_str(switch);
        }
    }
    (text, found)
}
