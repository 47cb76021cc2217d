//! Sizes and times as programs read them.

use std::time::Duration;

/// Reads bytes: `1GiB`, `512M`, `1.5 GB`. `K`, `M`, `G` and `T` alone are powers of 1024.
///
/// # Errors
/// If the text is no number with such a unit.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim().to_ascii_lowercase());
    let power = match unit.trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err("give a number of bytes with a unit, such as 512MiB or 2GiB".to_owned()),
    };
    let base = if unit.len() == 2 && unit.ends_with('b') { 1000f64 } else { 1024f64 };
    let number: f64 =
        number.parse().map_err(|_| "give a number of bytes, such as 512MiB or 2GiB".to_owned())?;
    Ok((number * base.powi(power)) as u64)
}

/// Reads a time: `90s`, `45m`, `1.5h`, `30d`.
///
/// # Errors
/// If the text is no number with such a unit.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || "give a time such as 90s, 45m, 2h or 30d".to_owned();
    let text = text.trim();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds =
        [('s', 1.0), ('m', 60.0), ('h', 3600.0), ('d', 86400.0)].iter().find(|(name, _)| *name == unit);
    let (_, seconds) = seconds.ok_or_else(wrong)?;
    let number: f64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        assert_eq!(parse_size("1.5 k"), Ok(1536));
        assert_eq!(parse_size("2MB"), Ok(2_000_000));
        assert_eq!(parse_size("0"), Ok(0));
        assert_eq!(parse_size("7B"), Ok(7));
        for wrong in ["", "GiB", "1XB", "-1", "1..2M", "one"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_read() {
        assert_eq!(parse_duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration(" 1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_duration("30d"), Ok(Duration::from_secs(30 * 86400)));
        for wrong in ["", "5", "m", "-1m", "5w", "infs", "1é"] {
            assert!(parse_duration(wrong).is_err(), "{wrong}");
        }
    }
}
