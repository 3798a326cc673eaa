//! The way from the tasks that serve connections to the one thread that holds the daemon's state.
//!
//! The state belongs to one thread and is not locked, while a request's handler may run on any. So the handler sends a job and
//! receives its result. A job that has begun is completed even if its client disconnects, and counts for its user until then:
//! requests of one user wait for each other ([`super::places`]), those of other users do not wait for them.

use std::{future::Future, pin::Pin, rc::Rc};

use sluice_api::{Code, Error};
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    task::spawn_local,
};

use super::{error::RequestRefusal, places};
use crate::registry::Registry;

type Job = Box<dyn FnOnce(Rc<Registry>) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// The end of the queue into which handlers put jobs.
#[derive(Clone, Debug)]
pub(crate) struct Mailbox(UnboundedSender<Job>);

/// The end of the queue from which the daemon's thread takes jobs.
pub(crate) struct MailboxReceiver(UnboundedReceiver<Job>);

/// Makes both ends.
pub(crate) fn mailbox() -> (Mailbox, MailboxReceiver) {
    let (sender, receiver) = unbounded_channel();
    (Mailbox(sender), MailboxReceiver(receiver))
}

impl Mailbox {
    /// Runs a job with the registry on the daemon's thread, and returns its result.
    pub(crate) async fn call<T, J, F>(&self, job: J) -> Result<T, RequestRefusal>
    where
        T: Send + 'static,
        J: FnOnce(Rc<Registry>) -> F + Send + 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        let turn = places::turn().await;
        let (sender, answer) = oneshot::channel();
        let job: Job = Box::new(move |registry| {
            let job = job(registry);
            Box::pin(async move {
                let answer = job.await;
                drop(turn);
                // The client may have disconnected.
                _ = sender.send(answer);
            })
        });
        let sent = self.0.send(job).is_ok();
        let ending = || RequestRefusal(Error::new(Code::Unavailable, "sluiced is ending"));
        if !sent {
            return Err(ending());
        }
        answer.await.map_err(|_| ending())?.map_err(RequestRefusal)
    }
}

impl MailboxReceiver {
    /// Starts each job as it arrives, for ever.
    pub(crate) async fn serve(mut self, registry: Rc<Registry>) {
        while let Some(job) = self.0.recv().await {
            spawn_local(job(Rc::clone(&registry)));
        }
    }
}
