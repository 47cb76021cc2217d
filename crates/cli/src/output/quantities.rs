//! Quantities as a person reads them.

/// Bytes as a person reads them.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" || value >= 100.0 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// Seconds as a person reads them, three digits.
pub(crate) fn seconds(value: f64) -> String {
    match value {
        v if v < 0.001 => format!("{:.0} µs", v * 1e6),
        v if v < 0.01 => format!("{:.2} ms", v * 1e3),
        v if v < 0.1 => format!("{:.1} ms", v * 1e3),
        v if v < 1.0 => format!("{:.0} ms", v * 1e3),
        v if v < 10.0 => format!("{v:.2} s"),
        v if v < 120.0 => format!("{v:.1} s"),
        v => format!("{:.0} min", v / 60.0),
    }
}

/// A number with two digits at least.
pub(crate) fn number(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// A share of a whole in percent.
pub(crate) fn percent(part: usize, whole: usize) -> String {
    format!("{:.0} %", 100.0 * part as f64 / whole.max(1) as f64)
}

/// A count with its noun.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("{number} {noun}") } else { format!("{number} {noun}s") }
}

/// How long ago, roughly.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min", s / 60),
        s if s < 48 * 3600 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(300 << 20), "300 MiB");
    }

    #[test]
    fn times_have_three_digits() {
        for (value, text) in
            [(0.0000123, "12 µs"), (0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms")]
        {
            assert_eq!(seconds(value), text);
        }
        for (value, text) in [(1.23456, "1.23 s"), (12.3456, "12.3 s"), (300.0, "5 min")] {
            assert_eq!(seconds(value), text);
        }
        assert_eq!((age(59), age(7200), age(200_000)), ("59 s".into(), "2 h".into(), "2 d".into()));
    }
}
