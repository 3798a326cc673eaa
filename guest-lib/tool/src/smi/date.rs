//! The date and time in the tool's texts, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

/// A moment in the calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Date {
    year: u64,
    month: usize,
    day: u64,
    /// Days since Sunday.
    weekday: usize,
    /// Hours, minutes, seconds, milliseconds.
    time: [u64; 4],
}

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];

impl Date {
    pub(crate) fn now() -> Date {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Date::at(u64::try_from(now.as_millis()).unwrap_or(0))
    }

    /// The date of so many milliseconds after the beginning of 1970.
    fn at(milliseconds: u64) -> Date {
        let (seconds, rest) = (milliseconds / 1000, milliseconds % 1000);
        let (mut days, second) = (seconds / 86_400, seconds % 86_400);
        // 1970 began on a Thursday.
        let weekday = usize::try_from((days + 4) % 7).unwrap_or(0);
        let leap =
            |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let mut year = 1970;
        while days >= 365 + u64::from(leap(year)) {
            days -= 365 + u64::from(leap(year));
            year += 1;
        }
        let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 0;
        while days >= lengths[month] {
            days -= lengths[month];
            month += 1;
        }
        let time = [second / 3600, second / 60 % 60, second % 60, rest];
        Date { year, month, day: days + 1, weekday, time }
    }

    /// As in `Thu Nov 26 11:54:26 2026`.
    pub(crate) fn long(&self) -> String {
        let [hour, minute, second, _] = self.time;
        let (day, month) = (DAYS[self.weekday], MONTHS[self.month]);
        format!("{day} {month} {:2} {hour:02}:{minute:02}:{second:02} {}", self.day, self.year)
    }

    /// As in `2026/11/26 11:54:26.123`.
    pub(crate) fn stamp(&self) -> String {
        let [hour, minute, second, rest] = self.time;
        let (month, day) = (self.month + 1, self.day);
        format!("{}/{month:02}/{day:02} {hour:02}:{minute:02}:{second:02}.{rest:03}", self.year)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(Date::at(0).long(), "Thu Jan  1 00:00:00 1970");
        assert_eq!(Date::at(951_782_400_000).long(), "Tue Feb 29 00:00:00 2000");
        assert_eq!(Date::at(1_795_694_066_123).stamp(), "2026/11/26 11:54:26.123");
        assert_eq!(Date::at(1_795_694_066_123).long(), "Thu Nov 26 11:54:26 2026");
    }
}
