//! Dates of the Gregorian calendar.

use chrono::DateTime;

/// Seconds since 1970 as `YYYY-MM-DD HH:MM UTC`; nothing of a time beyond the calendar.
pub fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.map_or_else(String::new, |time| time.format("%Y-%m-%d %H:%M UTC").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(59 * 86400), "1970-03-01 00:00 UTC");
        assert_eq!(utc(951_827_696), "2000-02-29 12:34 UTC");
        assert_eq!(utc(1_767_225_599), "2025-12-31 23:59 UTC");
        assert_eq!(utc(20_454 * 86400), "2026-01-01 00:00 UTC");
        assert_eq!(utc(u64::MAX), "");
    }
}
