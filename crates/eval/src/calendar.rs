//! Dates of the Gregorian calendar.

/// Seconds since 1970 as `YYYY-MM-DD HH:MM UTC` (Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`).
pub fn utc(seconds: u64) -> String {
    let days = seconds / 86400 + 719468;
    let (era, day_of_era) = (days / 146097, days % 146097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let (day, month) =
        (day_of_year - (153 * shifted + 2) / 5 + 1, if shifted < 10 { shifted + 3 } else { shifted - 9 });
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3600 % 24, seconds / 60 % 60)
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
    }
}
