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

use super::{error::Refusal, places};
use crate::registry::Registry;

type Work = Box<dyn FnOnce(Rc<Registry>) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Where work is put.
#[derive(Clone, Debug)]
pub(crate) struct Bridge(UnboundedSender<Work>);

/// Where it comes from.
pub(crate) struct Works(UnboundedReceiver<Work>);

/// Both sides.
pub(crate) fn bridge() -> (Bridge, Works) {
    let (sender, receiver) = unbounded_channel();
    (Bridge(sender), Works(receiver))
}

impl Bridge {
    /// Has something done with the registry.
    pub(crate) async fn call<T, W, F>(&self, work: W) -> Result<T, Refusal>
    where
        T: Send + 'static,
        W: FnOnce(Rc<Registry>) -> F + Send + 'static,
        F: Future<Output = Result<T, Error>> + 'static,
    {
        let turn = places::turn().await;
        let (sender, answer) = oneshot::channel();
        let work: Work = Box::new(move |registry| {
            let work = work(registry);
            Box::pin(async move {
                let answer = work.await;
                drop(turn);
                // The client may have gone.
                _ = sender.send(answer);
            })
        });
        let sent = self.0.send(work).is_ok();
        let ending = || Refusal(Error::new(Code::Unavailable, "sluiced is ending"));
        if !sent {
            return Err(ending());
        }
        answer.await.map_err(|_| ending())?.map_err(Refusal)
    }
}

impl Works {
    /// Does what is asked, all at once, for ever.
    pub(crate) async fn serve(mut self, registry: Rc<Registry>) {
        while let Some(work) = self.0.recv().await {
            spawn_local(work(Rc::clone(&registry)));
        }
    }
}
