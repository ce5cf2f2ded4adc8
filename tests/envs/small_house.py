"""The smallest ALFWorld game that has every kind of thing, for tests of single rules."""

OBJECTS = """
    agent1 - agent
    Apple_bar_1 Knife_bar_1 Mug_bar_1 Mug_bar_2 DeskLamp_bar_1 Pea_bar_1 - object
    Fridge_bar_1 Microwave_bar_1 Sink_bar_1_bar_SinkBasin CounterTop_bar_1 Shelf_bar_1 - receptacle
    AppleType KnifeType MugType DeskLampType PeaType - otype
    FridgeType MicrowaveType SinkBasinType CounterTopType ShelfType - rtype
    loc_door loc_fridge loc_microwave loc_sink loc_counter - location
"""
FACTS = """
    (atLocation agent1 loc_door)
    (receptacleAtLocation Fridge_bar_1 loc_fridge) (receptacleType Fridge_bar_1 FridgeType)
    (receptacleAtLocation Microwave_bar_1 loc_microwave)
    (receptacleType Microwave_bar_1 MicrowaveType)
    (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_sink)
    (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
    (receptacleAtLocation CounterTop_bar_1 loc_counter)
    (receptacleType CounterTop_bar_1 CounterTopType)
    (receptacleAtLocation Shelf_bar_1 loc_counter) (receptacleType Shelf_bar_1 ShelfType)
    (openable Fridge_bar_1) (openable Microwave_bar_1)
    (objectType Apple_bar_1 AppleType) (objectType Knife_bar_1 KnifeType)
    (objectType Mug_bar_1 MugType) (objectType Mug_bar_2 MugType)
    (objectType DeskLamp_bar_1 DeskLampType) (objectType Pea_bar_1 PeaType)
    (pickupable Apple_bar_1) (pickupable Knife_bar_1) (pickupable Mug_bar_1) (pickupable Mug_bar_2)
    (cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (sliceable Apple_bar_1)
    (heatable Mug_bar_1) (toggleable DeskLamp_bar_1)
    (isReceptacleObject Mug_bar_2) (inReceptacleObject Pea_bar_1 Mug_bar_2)
    (canContain FridgeType AppleType) (canContain CounterTopType AppleType)
    (canContain CounterTopType MugType) (canContain ShelfType MugType)
    (canContain CounterTopType KnifeType)
    (inReceptacle Apple_bar_1 Fridge_bar_1) (objectAtLocation Apple_bar_1 loc_fridge)
    (inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc_counter)
    (inReceptacle Mug_bar_1 CounterTop_bar_1) (objectAtLocation Mug_bar_1 loc_counter)
    (inReceptacle Mug_bar_2 Shelf_bar_1) (objectAtLocation Mug_bar_2 loc_counter)
    (inReceptacle DeskLamp_bar_1 Shelf_bar_1) (objectAtLocation DeskLamp_bar_1 loc_counter)
"""
HOT_APPLE_IN_FRIDGE = """(and (exists (?r - receptacle) (exists (?o - object)
    (and (heatable ?o) (objectType ?o AppleType) (receptacleType ?r FridgeType)
         (isHot ?o) (inReceptacle ?o ?r)))))"""
TWO_MUGS_ON_SHELF = """(and (exists (?r - receptacle) (exists (?o1 - object)
    (and (objectType ?o1 MugType) (receptacleType ?r ShelfType) (inReceptacle ?o1 ?r)
         (exists (?o2 - object) (and (not (= ?o1 ?o2)) (objectType ?o2 MugType)
                                     (inReceptacle ?o2 ?r)))))))"""
MUG_UNDER_LAMP = """(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
    (and (objectType ?ot DeskLampType) (toggleable ?ot) (isToggled ?ot)
         (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))
    (exists (?o - object ?a - agent) (and (objectType ?o MugType) (holds ?a ?o))))"""


def problem(goal: str = HOT_APPLE_IN_FRIDGE, more_facts: str = "", without: str = "") -> str:
    facts = FACTS.replace(without, "") if without else FACTS
    return f"""(define (problem small) (:domain alfred)
        (:objects {OBJECTS}) (:init {facts} {more_facts}) (:goal {goal}))"""
