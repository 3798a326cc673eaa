//! `sluice events`: the stream of events.

use std::{thread, time::Duration};

use anyhow::Result;
use sluice_api::v1::{Event, EventsQuery};

use crate::{
    api::{Api, ApiRefusal, explained, print},
    table::text,
};

/// Pause before the next attempt to reach an absent sluiced: the first, and the longest.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    api: Api,
    /// Token of an event, from --json; show the events after it
    #[arg(long, value_name = "TOKEN")]
    after: Option<String>,
    /// Exit after the last event so far, instead of waiting for more
    #[arg(long)]
    no_follow: bool,
    /// Exit when sluiced exits, instead of waiting for the next
    #[arg(long, conflicts_with = "no_follow")]
    no_reconnect: bool,
}

/// Follows events across restarts of sluiced, and reports each gap.
pub(crate) fn events(arguments: &Arguments) -> Result<()> {
    let mut after = arguments.after.clone();
    let mut wait = AGAIN.0;
    let mut connected = false;
    loop {
        let result = follow(arguments, &mut after, &mut || {
            wait = AGAIN.0;
            connected = true;
        });
        if arguments.no_follow || arguments.no_reconnect || !connected {
            return result;
        }
        // A request that the API refuses would be refused again.
        if let Err(error) = result {
            if error.downcast_ref::<ApiRefusal>().is_some() {
                return Err(error);
            }
            eprintln!("sluice: {error:#}; trying again");
        } else {
            eprintln!("sluice: sluiced has ended the stream; trying again");
        }
        thread::sleep(wait);
        wait = (wait * 2).min(AGAIN.1);
    }
}

/// Shows events until the stream ends; `after` is the token of the last event shown.
fn follow(arguments: &Arguments, after: &mut Option<String>, connected: &mut dyn FnMut()) -> Result<()> {
    let query = EventsQuery { after: after.clone(), follow: Some(!arguments.no_follow) };
    let events = arguments.api.ask(|api| api.events(&query))?;
    connected();
    for event in events {
        let event = event.map_err(explained)?;
        *after = Some(event.token.clone());
        if event.kind == "alive" {
            continue;
        }
        print(&if arguments.api.json {
            format!("{}\n", serde_json::to_value(&event)?)
        } else {
            shown(&event)
        })?;
    }
    Ok(())
}

/// An event as a line for people.
fn shown(event: &Event) -> String {
    let vm = event.vm.as_ref().map(|vm| format!("  VM {}", text(vm))).unwrap_or_default();
    format!("{}  {}{vm}  {}\n", utc(event.time), text(&event.kind), text(&event.detail))
}

/// Milliseconds since 1970 as a time of UTC.
fn utc(milliseconds: u64) -> String {
    let (seconds, days) = (milliseconds / 1000 % 86_400, milliseconds / 86_400_000);
    // Gregorian, with years that begin in March, so a leap day is the last day of its year (Hinnant's days_from_civil).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", milliseconds % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_milliseconds_are_shown_as_utc_calendar_time() {
        assert_eq!(utc(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(utc(951_782_400_001), "2000-02-29T00:00:00.001Z");
        assert_eq!(utc(1_709_251_199_999), "2024-02-29T23:59:59.999Z");
        assert_eq!(utc(1_709_251_200_000), "2024-03-01T00:00:00.000Z");
        assert_eq!(utc(4_102_444_799_000), "2099-12-31T23:59:59.000Z");
    }
}
