//! `/v1/events`: the event stream.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::{HeaderName, header},
    response::{IntoResponse, Response},
};
use sluice_api::{
    Code, Error,
    v1::{Event, EventsQuery},
};
use tokio::{
    sync::watch,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    api::Api,
    api::error::{Errors, RequestRefusal},
    api::extract::RequestQuery,
    api::places::RequestPlace,
    caller::Caller,
    records::journal::{Journal, JournalEvent as Entry, NextEvents},
};

/// Maximum number of events in one piece of the answer.
const PIECE: usize = 64;
/// Time limit for events that are being written, if the reader does not follow.
const SETTLING: Duration = Duration::from_secs(1);
/// Maximum pause of a stream, so that a dead client is noticed.
const SILENCE: Duration = Duration::from_secs(15);

/// A client that reads events, and its position.
struct EventReader {
    journal: Arc<Journal>,
    changes: watch::Receiver<u64>,
    caller: Caller,
    /// Number of the last event read.
    at: u64,
    follow: bool,
    /// True if the client's token belongs to another list.
    lost: bool,
    /// Maximum pause of the stream.
    silence: Duration,
    /// Time of the next line at the latest, also if no event is visible to this reader.
    silent_until: Instant,
    _place: RequestPlace,
}

impl EventReader {
    /// Returns the next piece of the answer; `None` at its end.
    async fn next(&mut self) -> Option<Bytes> {
        self.silent_until = Instant::now() + self.silence;
        if std::mem::take(&mut self.lost) {
            let text = "the token belongs to an unknown list; the oldest kept events follow";
            return Some(line(&self.own("gap", text)));
        }
        loop {
            self.changes.mark_unchanged();
            match self.journal.after(self.at, PIECE) {
                NextEvents::Gap(count) => {
                    self.at += count;
                    let text = match self.sees_all() {
                        true => format!("{count} events were lost"),
                        false => "events were lost, perhaps some of yours".to_owned(),
                    };
                    return Some(line(&self.own("gap", &text)));
                }
                NextEvents::Events(events) => {
                    self.at = events.last().map_or(self.at, |event| event.sequence);
                    let text: Vec<u8> = events
                        .iter()
                        .filter(|event| self.may_see(event))
                        .flat_map(|event| line(&self.show(event)))
                        .collect();
                    if !text.is_empty() {
                        return Some(text.into());
                    }
                    if self.follow && Instant::now() >= self.silent_until {
                        return Some(line(&self.own("alive", "")));
                    }
                }
                NextEvents::Nothing if !self.follow => return None,
                NextEvents::Nothing => match timeout_at(self.silent_until, self.changes.changed()).await {
                    Ok(Ok(())) => {}
                    // The daemon is ending.
                    Ok(Err(_)) => return None,
                    Err(_) => return Some(line(&self.own("alive", ""))),
                },
            }
        }
    }

    fn sees_all(&self) -> bool {
        self.caller.may_read().is_ok()
    }

    fn may_see(&self, event: &Entry) -> bool {
        event.vm.as_ref().map_or_else(
            || self.sees_all(),
            |vm| self.caller.may_see(vm.organisation.as_deref(), vm.project.as_deref()).is_ok(),
        )
    }

    fn show(&self, event: &Entry) -> Event {
        Event {
            sequence: self.sees_all().then_some(event.sequence),
            token: self.journal.token(event.sequence),
            time: event.time,
            kind: event.kind.to_string(),
            vm: event.vm.as_ref().map(|vm| vm.id.clone()),
            detail: event.detail.clone(),
        }
    }

    /// An event for this reader only.
    fn own(&self, kind: &str, detail: &str) -> Event {
        Event {
            sequence: self.sees_all().then_some(self.at),
            token: self.journal.salted_token(self.at),
            time: crate::records::journal::now(),
            kind: kind.to_owned(),
            vm: None,
            detail: detail.to_owned(),
        }
    }
}

fn line(event: &Event) -> Bytes {
    // A structure of strings and numbers can always be written.
    let mut text = serde_json::to_vec(event).unwrap_or_default();
    text.push(b'\n');
    text.into()
}

/// Follows events.
///
/// One JSON object per line. A client that was disconnected continues with the token of the last event it received, also after the daemon
/// was killed. It gets a `gap` if that event is too old, or older than the last boot of the machine.
#[utoipa::path(get, path = "/v1/events", tag = "events", operation_id = "get_events", params(EventsQuery),
    responses((status = 200, description = "One line for each event", body = Event, content_type = "application/x-ndjson"), Errors))]
pub(crate) async fn events(
    State(api): State<Api>,
    caller: Caller,
    RequestQuery(begin): RequestQuery<EventsQuery>,
) -> Result<Response, RequestRefusal> {
    let too_many = || Error::new(Code::Unavailable, "too many clients follow events");
    let place = api.followers.enter(&caller).ok_or_else(too_many)?;
    let journal = Arc::clone(&api.journal);
    let follow = begin.follow.unwrap_or(true);
    if !follow {
        // Events are written within moments. A reader does not wait for a disk that does not answer.
        _ = timeout(SETTLING, journal.settled()).await;
    }
    let (at, lost) = match &begin.after {
        None if follow => (journal.last(), false),
        None => (journal.oldest(), false),
        Some(token) => journal.resume(token).map_or_else(|| (journal.oldest(), true), |at| (at, false)),
    };
    let changes = journal.changes();
    let (silence, silent_until) = (SILENCE, Instant::now() + SILENCE);
    let reader =
        EventReader { journal, changes, caller, at, follow, lost, silence, silent_until, _place: place };
    let pieces = futures_util::stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await?;
        Some((Ok::<_, Infallible>(piece), reader))
    });
    let kind: [(HeaderName, &str); 1] = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((kind, Body::from_stream(pieces)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::places::{FOLLOWERS, RequestPlaces},
        caller::tests::{operator, tenant},
        records::journal::Subject,
    };

    fn reader(journal: &Arc<Journal>, caller: Caller, silence: Duration) -> EventReader {
        let place = RequestPlaces::new(FOLLOWERS).enter(&caller).expect("a place");
        EventReader {
            journal: Arc::clone(journal),
            changes: journal.changes(),
            caller,
            at: 0,
            follow: true,
            lost: false,
            silence,
            silent_until: Instant::now(),
            _place: place,
        }
    }

    fn parsed(piece: Option<Bytes>) -> Vec<serde_json::Value> {
        let piece = piece.expect("a piece");
        let lines = piece.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).expect("an event")).collect()
    }

    // Promise: A55
    #[tokio::test]
    async fn sequence_of_an_event_is_hidden_from_a_tenant_and_shown_to_an_operator() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = Arc::new(Journal::open(directory.path()));
        let subject = |organisation: &str| Subject {
            id: "web".to_owned(),
            organisation: Some(organisation.to_owned()),
            project: None,
        };
        for organisation in ["other", "acme", "other", "acme"] {
            journal.note("vm-created", Some(subject(organisation)), "");
        }
        journal.settled().await;
        let mine = parsed(reader(&journal, tenant(), SILENCE).next().await);
        assert_eq!(mine.len(), 2, "{mine:?}");
        assert!(mine.iter().all(|event| event.get("sequence").is_none()), "{mine:?}");
        assert_eq!(journal.resume(mine[0]["token"].as_str().expect("a token")), Some(2));
        let all = parsed(reader(&journal, operator(), SILENCE).next().await);
        assert_eq!(
            all.iter().map(|event| event["sequence"].as_u64()).collect::<Vec<_>>(),
            [1, 2, 3, 4].map(Some)
        );
    }

    // Promise: A55
    #[tokio::test]
    async fn alive_is_sent_while_events_stream_that_the_reader_may_not_see() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = Arc::new(Journal::open(directory.path()));
        for _ in 0..3 * PIECE {
            journal.note("unit-readmitted", None, "");
        }
        journal.settled().await;
        // The time limit is zero, so it ends at once; two thirds of the events are still unread then.
        let said = parsed(reader(&journal, tenant(), Duration::ZERO).next().await);
        assert_eq!(said[0]["kind"], "alive", "{said:?}");
        assert!(said[0].get("sequence").is_none(), "{said:?}");
        let at = journal.resume(said[0]["token"].as_str().expect("a token"));
        assert_eq!(at, u64::try_from(PIECE).ok(), "the token covers the events read so far");
    }
}
