use super::*;
use crate::{
    configuration::{Arguments, Configuration},
    handover::fd_store::FdStore,
    records::state::adoption::Adoption,
};
use sluice_messages::inventory::{InstancePlaces, PciAddress, WHOLE};
use sluice_runtime::closer::Closers;
use tokio::{task::LocalSet, time::Instant as Clock};

const LARGE: InstanceProfile = InstanceProfile { id: 9, slices: 3, ..SMALL };
const SMALL: InstanceProfile = InstanceProfile {
    id: 19,
    slices: 1,
    instances: 7,
    multiprocessors: 16,
    memory: 1 << 30,
    capabilities: 0,
    engines: sluice_messages::inventory::Engines { copy: 1, decoder: 1, encoder: 0, jpeg: 1, ofa: 0 },
};
const MADE: Instance = Instance { gpu: 7, compute: 0, profile: 19, start: 0, size: 1, uuid: [7; 16] };
const PCI: PciAddress = PciAddress { domain: 1, bus: 2, device: 3 };
const NAME: &str = "a name so long that it does not fit into a single message of the inventory";

/// Runs a test with an inventory whose answers are `answer`, or none.
fn with(
    mut answer: impl FnMut(ToInventory) -> Option<FromInventory> + 'static,
    test: impl AsyncFnOnce(&Inventory),
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let all = LocalSet::new();
    all.block_on(&runtime, async {
        let arguments = Arguments {
            runtime_dir: Some("/nowhere".into()),
            // Any file: the test loads no driver.
            driver: std::env::current_exe().ok(),
            libexec: Some("/nowhere".into()),
            ..Arguments::default()
        };
        let configuration = Rc::new(Configuration::load(arguments).expect("a configuration"));
        let (event_sender, _heard) = tokio::sync::mpsc::unbounded_channel();
        let fd_store = Rc::new(FdStore::new(Closers::new(1)).expect("nothing is passed"));
        let adoption = Rc::new(Adoption::open(&configuration.runtime_dir, false));
        let launching = Launching::new(configuration, None, fd_store, adoption);
        let inventory = Inventory::new(Rc::new(launching), event_sender);
        let (ours, theirs) = socket::pair().expect("a socket");
        let (queue, mut queued) = send_queue();
        *inventory.running.borrow_mut() = Some(queue);
        let (own, played) = (Rc::clone(&inventory), Channel::new(theirs).expect("a channel"));
        tokio::task::spawn_local(async move {
            let channel = Channel::new(ours).expect("a channel");
            tokio::select! {
                result = own.receive(&channel) => result.expect("answers"),
                result = queued.send(&channel) => result.expect("a socket"),
            }
        });
        tokio::task::spawn_local(async move {
            while let Ok(Some((request, _))) = played.receive().await {
                if let Some(said) = answer(request) {
                    played.send(&said, &[]).await.expect("sent");
                }
            }
        });
        test(&inventory).await;
    });
}

/// Two profiles and one instance.
fn usual(request: ToInventory) -> Option<FromInventory> {
    Some(match request {
        ToInventory::Profile { serial, index: 0, .. } => FromInventory::Profile { serial, profile: SMALL },
        ToInventory::Profile { serial, index: 1, .. } => FromInventory::Profile { serial, profile: LARGE },
        ToInventory::ProfileName { serial, part, .. } | ToInventory::DeviceName { serial, part, .. } => {
            FromInventory::Name { serial, text: NamePart::part(NAME, part) }
        }
        ToInventory::Places { serial, profile: 9, .. } => {
            let places = InstancePlaces::new(&[
                InstancePlace { start: 0, size: 4 },
                InstancePlace { start: 4, size: 4 },
            ]);
            FromInventory::Places { serial, places: places.expect("few") }
        }
        ToInventory::Places { serial, .. } => {
            FromInventory::Places { serial, places: InstancePlaces::default() }
        }
        ToInventory::Instance { serial, index: 0, .. } => FromInventory::Instance { serial, instance: MADE },
        ToInventory::Profile { serial, .. } | ToInventory::Instance { serial, .. } => {
            FromInventory::Nothing { serial }
        }
        ToInventory::Device { serial, .. } => {
            let (uuid, memory, node) = ([1; 16], 1 << 40, u32::MAX);
            let pci = PCI;
            FromInventory::Device { serial, uuid, memory, multiprocessors: 132, node, pci }
        }
        ToInventory::Create { serial, .. } => FromInventory::Instance { serial, instance: MADE },
        ToInventory::Destroy { serial, instance: 7, .. } => FromInventory::Done { serial },
        ToInventory::Destroy { serial, instance: 8, .. } => FromInventory::Failed { serial, error: 19 },
        ToInventory::Destroy { serial, .. } => FromInventory::Failed { serial, error: 6 },
        ToInventory::Units { serial } => FromInventory::Units { serial, count: 1 },
        other => panic!("{other:?}"),
    })
}

// Promise: P44
#[test]
fn lists_and_names_in_several_messages_are_joined() {
    with(usual, async |inventory| {
        let kinds = inventory.kinds(0).await.expect("kinds");
        assert_eq!(kinds.iter().map(|kind| kind.profile).collect::<Vec<_>>(), [SMALL, LARGE]);
        assert_eq!((kinds[0].name.as_str(), kinds[0].places.len(), kinds[1].places.len()), (NAME, 0, 2));
        assert_eq!(inventory.instances(0).await, Ok(vec![MADE]));
        let device = inventory.device(0).await.expect("a device");
        assert_eq!((device.name.as_str(), device.node, device.pci), (NAME, None, PCI));
        let place = InstancePlace { start: 0, size: 1 };
        assert_eq!(inventory.create(0, 19, place).await, Ok(MADE));
        assert_eq!(inventory.destroy(0, &MADE).await, Ok(()));
        let used = Instance { gpu: 8, compute: WHOLE, ..MADE };
        assert_eq!(inventory.destroy(0, &used).await, Err(AskError::IN_USE));
        assert_eq!(inventory.destroy(0, &Instance { gpu: 9, ..MADE }).await, Err(AskError::NOT_FOUND));
    });
}

// Promise: P44
#[test]
fn change_that_hangs_is_given_up_at_its_time_limit() {
    // During a change it does not even answer other requests.
    let silent = |request| match request {
        ToInventory::Units { .. } | ToInventory::Create { .. } => None,
        other => usual(other),
    };
    with(silent, async |inventory| {
        let start = Clock::now();
        assert_eq!(inventory.question(|serial| ToInventory::Units { serial }).await, Err(AskError::Silent));
        assert!((ANSWER..CHANGE).contains(&start.elapsed()), "{:?}", start.elapsed());
        let start = Clock::now();
        let place = InstancePlace { start: 0, size: 1 };
        let change = inventory.create(0, 19, place);
        let question = async {
            sleep(ANSWER).await;
            assert_eq!(
                inventory.question(|serial| ToInventory::Units { serial }).await,
                Err(AskError::Silent)
            );
            start.elapsed()
        };
        let (made, asked) = tokio::join!(change, question);
        assert_eq!(made, Err(AskError::Silent));
        assert!(asked >= CHANGE, "a request is given up after {asked:?}");
        assert!(start.elapsed() >= CHANGE);
        // The task that runs the process is notified, and other requests have their own time limit again.
        timeout(Duration::from_millis(1), inventory.silent.notified()).await.expect("told");
        let start = Clock::now();
        assert_eq!(inventory.question(|serial| ToInventory::Units { serial }).await, Err(AskError::Silent));
        assert!(start.elapsed() < CHANGE);
    });
}
