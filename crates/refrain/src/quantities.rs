//! Sizes and times as programs read them.

use std::str::FromStr;
use std::time::Duration;

use crate::store::Limits;

/// Reads bytes: `1GiB`, `512M`, `1.5 GB`, `7B`. `K`, `M`, `G` and `T` alone are powers of 1024.
///
/// # Errors
/// If the text is no number with such a unit, which 0 alone needs not. A bound that was meant in GiB and read in bytes would delete a
/// whole store.
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
    if unit.is_empty() && number != 0.0 {
        return Err(format!("{text} has no unit: give {text}GiB or {text}B"));
    }
    Ok((number * base.powi(power)) as u64)
}

/// Longest time that [`parse_duration`] reads: a century, which can be added to any instant.
const LONGEST: Duration = Duration::from_secs(36_525 * 86_400);

/// Reads a time: `90s`, `45m`, `1.5h`, `30d`.
///
/// # Errors
/// If the text is no number with such a unit, or the time is longer than 36525 days.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || "give a time such as 90s, 45m, 2h or 30d".to_owned();
    let text = text.trim();
    let unit = text.chars().last().ok_or_else(wrong)?;
    let seconds =
        [('s', 1.0), ('m', 60.0), ('h', 3600.0), ('d', 86400.0)].iter().find(|(name, _)| *name == unit);
    let (_, seconds) = seconds.ok_or_else(wrong)?;
    let number: f64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    let seconds = number * seconds;
    if seconds > LONGEST.as_secs_f64() {
        return Err("give a time of at most 36525d".to_owned());
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// Reads a number of tokens, or `all` there are.
///
/// # Errors
/// If the text is neither.
pub fn parse_tokens(text: &str) -> Result<usize, String> {
    match text {
        "all" => Ok(usize::MAX),
        number => number.parse().map_err(|_| format!("{number} is not a number of tokens, or all")),
    }
}

/// A number of tokens as [`parse_tokens`] reads it.
pub fn tokens_text(tokens: usize) -> String {
    match tokens {
        usize::MAX => "all".to_owned(),
        number => number.to_string(),
    }
}

/// How often documents are brought in line with other machines, a time or `off`; none if they are not shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncInterval(pub Option<Duration>);

impl FromStr for SyncInterval {
    type Err = String;

    fn from_str(text: &str) -> Result<SyncInterval, String> {
        match text {
            "off" => Ok(SyncInterval(None)),
            time => match parse_duration(time)? {
                Duration::ZERO => Err("give a time above 0, or off".to_owned()),
                time => Ok(SyncInterval(Some(time))),
            },
        }
    }
}

/// Most bytes of a namespace (`NAMESPACE=SIZE`), or of each that has no other (`SIZE`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The namespace; none for each that has no quota of its own.
    pub namespace: Option<String>,
    /// Its bytes in the store's folder.
    pub bytes: u64,
}

impl FromStr for Quota {
    type Err = String;

    fn from_str(text: &str) -> Result<Quota, String> {
        let (namespace, size) = match text.rsplit_once('=') {
            Some((namespace, size)) => (Some(namespace.trim().to_owned()), size),
            None => (None, text),
        };
        Ok(Quota { namespace, bytes: parse_size(size)? })
    }
}

impl Quota {
    /// Sets quotas in the limits of a store.
    pub fn set_all(quotas: &[Quota], limits: &mut Limits) {
        for Quota { namespace, bytes } in quotas {
            match namespace {
                None => limits.quota = *bytes,
                Some(namespace) => _ = limits.quotas.insert(namespace.clone(), *bytes),
            }
        }
    }
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
        assert_eq!(parse_size("50"), Err("50 has no unit: give 50GiB or 50B".to_owned()));
        for wrong in ["", "GiB", "1.5", "1XB", "-1", "1..2M", "one"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_read() {
        assert_eq!(parse_duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration(" 1.5h"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_duration("30d"), Ok(Duration::from_secs(30 * 86400)));
        for wrong in ["", "5", "m", "-1m", "5w", "nans", "1é"] {
            assert_eq!(
                parse_duration(wrong),
                Err("give a time such as 90s, 45m, 2h or 30d".to_owned()),
                "{wrong}"
            );
        }
        assert_eq!(parse_duration("36525d"), Ok(LONGEST));
        for long in ["36526d", "150000000000000d", "infs"] {
            assert_eq!(parse_duration(long), Err("give a time of at most 36525d".to_owned()), "{long}");
        }
    }

    #[test]
    fn tokens_and_intervals_are_numbers_or_words() {
        assert_eq!((parse_tokens("all"), parse_tokens("7")), (Ok(usize::MAX), Ok(7)));
        assert!(parse_tokens("some").is_err());
        for tokens in [0, 7, usize::MAX] {
            assert_eq!(parse_tokens(&tokens_text(tokens)), Ok(tokens));
        }
        assert_eq!("off".parse(), Ok(SyncInterval(None)));
        assert_eq!("2s".parse(), Ok(SyncInterval(Some(Duration::from_secs(2)))));
        assert!("0s".parse::<SyncInterval>().is_err());
    }

    #[test]
    fn quotas_are_of_one_namespace_or_of_all_others() {
        let quotas = ["2k", "shared=1M"].map(|text| text.parse::<Quota>().unwrap());
        let mut limits = Limits::memory(0);
        Quota::set_all(&quotas, &mut limits);
        assert_eq!((limits.quota_of("a"), limits.quota_of("shared")), (2048, 1 << 20));
        assert!("shared".parse::<Quota>().is_err());
    }
}
