//! The controller's messages to hosts.

use control::{Config, IslandState};

use super::*;

/// Returns a world in which an island is being started, and the first host of that island.
fn starting() -> (Arc<World>, IslandId, HostId) {
    let spec = IslandSpec { hosts: 1, devices_per_host: 1 };
    let data = DataPlane::listen(CONTROLLER, "tcp:127.0.0.1:0", &[], "secret", false).unwrap();
    let (world, _) = World::new(Controller::new(Cluster::new(&[spec]), Config::default()), data);
    let island = world.add_island(&spec);
    let host = world.inspect(|controller| controller.cluster().island(island).unwrap().hosts[0]);
    (world, island, host)
}

fn fail_a_message(world: &World, host: HostId) {
    world.send(&world.notices, host, |_| Err(Status::new(Code::Unavailable, "not reached")));
    std::thread::sleep(LAST_WORDS * 3 / 2);
}

#[test]
fn a_host_that_messages_do_not_reach_is_lost_if_it_is_there() {
    let (world, island, host) = starting();
    let state = || world.overview().islands[island.0 as usize].state;
    fail_a_message(&world, host);
    assert_eq!(state(), IslandState::Starting, "no process of it has joined");
    world.open_outgoing(host, "tcp:127.0.0.1:1").unwrap();
    fail_a_message(&world, host);
    assert_eq!(state(), IslandState::Lost);
    world.data().close();
}
