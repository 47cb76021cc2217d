//! Numbers as tables have them.

/// Microseconds, without a unit.
pub(crate) fn microseconds(seconds: f64) -> String {
    number(1e6 * seconds)
}

/// A number with a digit behind the point if it is below 10, else with none.
pub(crate) fn number(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}
