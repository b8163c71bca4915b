//! Hosts that join and are lost, as events of the controller's state machine.

mod common;

use base::{HostId, IslandId, Nanos};
use common::{controller, join};
use control::{Effect, Event, IslandState};
use topology::IslandSpec;

#[test]
fn hosts_of_an_island_have_one_jaxlib() {
    let mut controller = controller(1, 2);
    join(&mut controller, 0, "0.10.2");
    let effects = join(&mut controller, 1, "0.11.2");
    assert!(effects.iter().any(|effect| matches!(effect, Effect::StopHost(HostId(1)))));
    assert!(!controller.is_up());
    let lost = controller.overview().islands[0].hosts[1].lost.clone().unwrap();
    for part in ["host 1 of island 0", "jaxlib is 0.11.2", "host 0 is 0.10.2"] {
        assert!(lost.contains(part), "{lost}");
    }
}

#[test]
fn islands_may_differ() {
    let mut controller = controller(2, 1);
    join(&mut controller, 0, "0.10.2");
    join(&mut controller, 1, "0.11.2");
    assert!(controller.is_up());
}

#[test]
fn a_loss_reaches_the_other_islands_ahead_of_commands() {
    let mut controller = controller(3, 2);
    for host in 0..6 {
        join(&mut controller, host, "0.10.2");
    }
    let lost = Event::HostLost { host: HostId(2), cause: "it was pulled".to_owned() };
    let told: Vec<(u32, u32)> = controller
        .handle(Nanos(0), lost)
        .into_iter()
        .filter_map(|effect| match effect {
            Effect::LosePeer { host, lost, error, .. } => {
                assert!(error.message.contains("host 0 of island 1"), "{error}");
                Some((host.0, lost.0))
            }
            _ => None,
        })
        .collect();
    assert_eq!(told, [(0, 2), (0, 3), (1, 2), (1, 3), (4, 2), (4, 3), (5, 2), (5, 3)]);
}

#[test]
fn an_island_that_starts_again_is_not_lost_with_its_earlier_process() {
    let mut controller = controller(2, 1);
    join(&mut controller, 0, "0.10.2");
    join(&mut controller, 1, "0.10.2");
    controller.remove_island(IslandId(1), true).unwrap();
    assert_eq!(controller.add_island(&IslandSpec::new(1, 1)), IslandId(1));
    let late = Event::HostLost { host: HostId(1), cause: "its process has ended".to_owned() };
    controller.handle(Nanos(0), late);
    assert_eq!(controller.island_state(IslandId(1)), IslandState::Starting);
    join(&mut controller, 1, "0.10.2");
    assert_eq!(controller.island_state(IslandId(1)), IslandState::Up);
}

#[test]
fn an_island_that_starts_again_with_another_jaxlib_is_lost_for_that() {
    let mut controller = controller(2, 2);
    for host in 0..4 {
        join(&mut controller, host, "0.10.2");
    }
    controller.remove_island(IslandId(1), true).unwrap();
    controller.add_island(&IslandSpec::new(2, 1));
    join(&mut controller, 2, "0.10.2");
    let effects = join(&mut controller, 3, "0.11.2");
    assert!(effects.iter().any(|effect| matches!(effect, Effect::StopHost(HostId(3)))));
    assert_eq!(controller.island_state(IslandId(1)), IslandState::Lost);
    let lost = controller.overview().islands[1].hosts[1].lost.clone().unwrap();
    assert!(lost.contains("jaxlib is 0.11.2"), "{lost}");
}
