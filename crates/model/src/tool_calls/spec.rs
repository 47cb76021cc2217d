//! The notations of calls, as far as their parser must know them.

/// A family's notation of calls.
#[derive(Debug)]
pub(super) struct Spec {
    /// Texts that begin calls.
    pub(super) begin: &'static [&'static str],
    /// The text behind the calls; a model may leave it out.
    pub(super) end: Option<&'static str>,
    /// Whether an answer that begins with a call needs none of `begin`.
    pub(super) bare: bool,
    /// Whether calls stand in a JSON list.
    pub(super) list: bool,
    /// Whether a call can be `name[ARGS]{…}`.
    pub(super) named: bool,
    /// The key of the arguments in a call's object.
    pub(super) arguments: &'static str,
    /// The text between calls that stand in no list.
    pub(super) separator: Option<&'static str>,
    /// The special tokens that the notation uses, in vocabularies that have them.
    pub(super) special: &'static [&'static str],
}

/// The mark between the name and the arguments of a `named` call.
pub(super) const ARGS: &str = "[ARGS]";
/// The mark before the id of a `named` call.
pub(super) const CALL_ID: &str = "[CALL_ID]";
